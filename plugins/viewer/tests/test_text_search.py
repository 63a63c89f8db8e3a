"""The search: it finds the head of a list first, then counts, continues when a run grows, and gives way to requests."""

import threading

import pytest
from viewer_runs import GUARD_S, build_episode, several_records, write_run

from turnwise_result_files import TrajectoryWriter
from turnwise_viewer.episode_index import Filter
from turnwise_viewer.run_folder import RunFolder
from turnwise_viewer.running_requests import RunningRequests


@pytest.fixture
def open_run():
    """A function that opens a run, which is closed at the end."""
    runs = []
    yield lambda folder: runs.append(RunFolder.open(folder)) or runs[-1]
    for run in runs:
        run.close()


def find_all(run, text, **order):
    """Return a complete search."""
    while (found := run.search(text, Filter(), len(run.index), **order)).num_open:
        pass
    return found


def test_the_head_of_a_sorted_list_is_there_before_all_texts_are_read(tmp_path, reads, serve):
    """The page in the order of the rewards is settled when its groups are read; the rest is counted afterwards."""
    client = serve(write_run(tmp_path, [build_episode(task, reward=task) for task in range(40)]))
    reads.hold(range(8))
    page = {"q": "the answer", "sort": "reward", "order": "desc", "limit": 5}

    while not (answer := client.get("runs/0/episodes", **page))["settled"]:
        pass
    assert [each["reward"] for each in answer["episodes"]] == [39, 38, 37, 36, 35]
    assert 5 <= answer["total"] <= 8
    assert (answer["at_most"], answer["searched"] < 1) == (40, True)
    assert {*reads} <= {8, 9}

    reads.released.set()
    while (answer := client.get("runs/0/episodes", **page))["searched"] < 1:
        pass
    assert (answer["total"], answer["at_most"]) == (40, 40)
    assert sorted(reads) == [*range(10)]


def test_a_search_with_filters_and_another_order_reads_no_group_again(tmp_path, reads, serve):
    """Another order continues the same search, and a filter leaves out groups in which it keeps no episode."""
    client = serve(write_run(tmp_path, [build_episode(task, reward=task) for task in range(40)]))
    reads.hold([0])
    page = {"q": "the answer", "limit": 5, "min_reward": 2, "max_reward": 17}
    assert client.get("runs/0/episodes", **page)["settled"] is False

    page |= {"sort": "reward", "order": "desc"}
    while not (answer := client.get("runs/0/episodes", **page))["settled"]:
        pass
    assert [each["reward"] for each in answer["episodes"]] == [17, 16, 15, 14, 13]
    reads.released.set()
    while (answer := client.get("runs/0/episodes", **page))["searched"] < 1:
        pass

    assert answer["total"] == 16
    assert sorted(reads) == [*range(5)]


def test_two_searches_do_not_begin_anew_for_each_other(tmp_path, reads, open_run):
    """Two pages that ask in turns both come to an end, and each reads a group once."""
    run = open_run(write_run(tmp_path, [build_episode(task) for task in range(24)]))
    texts = {"the answer": 24, "of task 7": 1}
    reads.hold([5])
    for text in texts:
        assert run.search(text, Filter(), 24).num_open

    reads.released.set()
    assert {text: len(find_all(run, text).numbers) for text in texts} == texts

    assert sorted(reads) == sorted([*range(6)] * 2)


def test_old_searches_end(tmp_path, reads, open_run):
    """Only the newest searches are kept."""
    run = open_run(write_run(tmp_path, [build_episode(task) for task in range(4)]))
    for number in range(9):
        assert len(find_all(run, f"task {number}").numbers) == (number < 4)

    assert [text for text, _wanted in run._searches] == ["task 5", "task 6", "task 7", "task 8"]


def test_a_search_continues_when_the_run_grows(tmp_path, reads, open_run):
    """New episodes of a running run are searched alone; the hits before them stay."""
    with TrajectoryWriter(tmp_path / "trajectories.parquet", rows_per_group=2) as writer:
        for task in range(6):
            writer.write(build_episode(task))
        writer.flush()
        run = open_run(tmp_path)
        assert find_all(run, "the answer").numbers.tolist() == [*range(6)]
        num_groups = len(run.index.row_of_group) - 1
        assert sorted(reads) == [*range(num_groups)]

        writer.write(build_episode(6, text="something else"))
        writer.write(several_records(7))
        writer.flush()
        assert run.refresh()
        found = find_all(run, "the answer", sort="row", descending=True)

        assert found.numbers.tolist() == [7, 5, 4, 3, 2, 1, 0]
        assert min(reads[num_groups:]) == num_groups


@pytest.fixture
def waits(monkeypatch):
    """An event that is set when a thread gives way."""
    waits = threading.Event()
    give_way = RunningRequests.give_way

    def watch(self, is_urgent):
        waits.set()
        give_way(self, is_urgent)

    monkeypatch.setattr(RunningRequests, "give_way", watch)
    return waits


def test_signatures_give_way_to_requests(tmp_path, waits, open_run):
    """While a request runs no text is signed; a stop ends the wait."""
    run = open_run(write_run(tmp_path, [build_episode(task) for task in range(12)]))
    stopped = threading.Event()

    def start():
        thread = threading.Thread(target=run.sign_texts, args=(stopped,), kwargs={"min_groups": 1})
        thread.start()
        assert waits.wait(GUARD_S)
        return thread

    with run.requests:
        thread = start()
        assert len(run._signatures) == 0
        stopped.set()
        run.requests.wake()
        thread.join(GUARD_S)
        assert not thread.is_alive()
        stopped.clear()
        waits.clear()
        thread = start()
        assert thread.is_alive()
    thread.join(GUARD_S)

    assert len(run._signatures) == 3


def test_a_count_gives_way_to_requests(tmp_path, waits, reads, open_run):
    """A search for which no request waits pauses while other requests run, and continues for the next one."""
    run = open_run(write_run(tmp_path, [build_episode(task) for task in range(40)]))
    reads.hold([0, 1])
    with run.requests:
        assert run.search("the answer", Filter(), 40).num_open == 40
        waits.clear()
        reads.released.set()
        assert waits.wait(GUARD_S)
        assert {*reads} <= {0, 1}

        assert len(find_all(run, "the answer").numbers) == 40
