"""The driver's books: whatever dies or is cut, each episode is delivered once."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise import EpisodeResult, Status, Task
from turnwise.episode_spec import EpisodeSpec, UnfinishedEpisode
from turnwise.runtime.books import Books


def spec(number):
    return EpisodeSpec(task=Task(messages=({"role": "user", "content": "x"},), uid=str(number)), agent_name="a")


def finished(an_episode):
    return EpisodeResult(task=an_episode.task, status=Status.COMPLETED)


@settings(max_examples=200)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(0, 2), st.integers(1, 4)),
            st.tuples(st.just("finish"), st.integers(0, 2), st.integers(0, 3)),
            st.tuples(st.just("lose"), st.integers(0, 2), st.just(0)),
            st.tuples(st.just("cut"), st.integers(0, 11), st.integers(0, 11)),
        ),
        max_size=40,
    )
)
def test_each_episode_is_delivered_once(events):
    """
    Workers take, finish, and die, and episodes are cut, in any order: each is delivered once, and the end is told once.
    """
    books, delivered, ended, held = Books(max_kills=2), Counter(), [], {0: {}, 1: {}, 2: {}}
    keys = books.open([spec(i) for i in range(12)], lambda n, r: delivered.update([n]), lambda: ended.append(True))
    for what, one, two in events:
        if what == "take":
            held[one] |= dict(books.take(one, two))
        elif what == "finish" and held[one]:
            key = sorted(held[one])[min(two, len(held[one]) - 1)]
            books.finish(one, key, finished(held[one].pop(key)))
        elif what == "lose":
            books.lose(one, "killed")
            held[one] = {}
        elif what == "cut":
            given = books.cut(keys[min(one, two) : max(one, two)])
            assert all(set(its) <= set(held[worker]) for worker, its in given.items())
    assert max(delivered.values(), default=0) <= 1
    for worker in held:
        books.lose(worker, "killed")
    books.fail_all("the end")

    assert delivered == Counter(range(12))
    assert ended == [True]
    assert books.num_open == 0


def test_what_is_cut_is_aborted_and_can_go_on():
    """
    Episodes that wait are delivered as aborted at once, and those of a worker that dies afterwards too.
    """
    books, got = Books(), {}
    keys = books.open([spec(i) for i in range(4)], got.__setitem__, lambda: None)
    books.take(0, 2)

    assert books.cut(keys[1:]) == {0: [keys[1]]}
    assert {number: result.status for number, result in got.items()} == {2: Status.ABORTED, 3: Status.ABORTED}
    books.lose(0, "killed")
    assert got[1].status is Status.ABORTED
    assert all(not result.unfinished.began for result in got.values())
    assert books.num_retried == 1


def test_a_resumed_episode_keeps_what_it_had_when_its_worker_dies():
    """
    It goes on from its checkpoint again, and when it is set aside its result holds the record so far.
    """
    from turnwise import Trajectory

    record = Trajectory([1])
    record.add_action([2], [-1.0])
    plain = spec(0)
    resumed = UnfinishedEpisode(spec=plain, trajectories=(record,), num_steps=1).resumed_spec
    books, got = Books(max_kills=1), {}
    books.open([resumed], got.__setitem__, lambda: None)
    books.take(0, 1)
    books.lose(0, "killed")

    assert (got[0].status, got[0].fault.kind) == (Status.FAILED, "PoisonedEpisode")
    assert got[0].trajectories[0].input_ids.tolist() == [1, 2]
    assert books.num_set_aside == 1


@settings(max_examples=200)
@given(
    killers=st.sets(st.integers(0, 29), max_size=5),
    windows=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    order=st.randoms(use_true_random=False),
)
def test_only_those_who_kill_are_set_aside(killers, windows, order):
    """
    Whoever was with them finishes, however many a worker has at once and whichever of its episodes goes on first.
    """
    books, got = Books(), {}
    books.open([spec(i) for i in range(30)], got.__setitem__, lambda: None)
    held = [{} for _ in windows]
    for _ in range(2000):
        if not books.num_open:
            break
        worker = order.randrange(len(windows))
        held[worker] |= dict(books.take(worker, windows[worker]))
        if held[worker]:
            key = order.choice(sorted(held[worker]))
            if int(held[worker][key].task.uid) in killers:
                books.lose(worker, "killed")
                held[worker] = {}
            else:
                books.finish(worker, key, finished(held[worker].pop(key)))

    assert {number for number, result in got.items() if result.status is Status.FAILED} == killers
    assert len(got) == 30
    assert books.num_set_aside == len(killers)


def test_who_runs_alone_has_the_worker_to_itself():
    """
    Its worker ends what it has before, takes nothing beside it, and others go on meanwhile.
    """
    books, got = Books(max_kills=1), {}
    books.open([spec(i) for i in range(4)], got.__setitem__, lambda: None)
    books.take(0, 2)
    books.take(1, 1)
    books.lose(0, "killed")

    assert books.take(1, 4) == []  # it is to run the two, and has another
    assert [key for key, _ in books.take(0, 4)] == [3]
    books.finish(1, 2, finished(spec(2)))
    assert [key for key, _ in books.take(1, 4)] == [0]
    assert books.take(1, 4) == []
    books.lose(1, "killed again")
    assert (got[0].status, got[0].fault.kind) == (Status.FAILED, "PoisonedEpisode")
    assert "2 workers died" in got[0].fault.message
    books.finish(0, 3, finished(spec(3)))
    assert [key for key, _ in books.take(0, 4)] == [1]
    assert books.cut([1]) == {0: [1]}
