"""The search: it finds the head of a list first, then counts, continues when a run grows, and ends with its request."""

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from viewer_runs import GUARD_S, HOSTILE, build_episode, several_records, write_run

from turnwise_result_files import TrajectoryWriter
from turnwise_viewer import run_folder
from turnwise_viewer.episode_index import Filter
from turnwise_viewer.run_folder import RunFolder
from turnwise_viewer.text_search import TextSearch


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


@pytest.mark.slow
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


def test_a_search_works_only_while_a_request_waits(tmp_path, reads, open_run):
    """After the answer no more texts are read; the next request continues, and reads no group again."""
    run = open_run(write_run(tmp_path, [build_episode(task) for task in range(40)]))
    reads.hold([0, 1])
    assert run.search("the answer", Filter(), 40).num_open == 40
    ((_state, search),) = run._searches.values()
    reads.released.set()
    with search._progress:
        assert search._progress.wait_for(lambda: search._num_running == 0, GUARD_S)
    assert sorted(reads) == [0, 1]

    assert len(find_all(run, "the answer").numbers) == 40
    assert sorted(reads) == [*range(10)]


def test_the_second_request_for_a_settled_page_waits_for_the_count(tmp_path, monkeypatch, reads, open_run):
    """The first one is answered while episodes are unread. Another page and another order are answered so too."""
    run = open_run(write_run(tmp_path, [build_episode(task) for task in range(40)]))
    reads.hold([9])
    monkeypatch.setattr(run_folder, "_SEARCH_S", GUARD_S)
    found = [run.search("the answer", Filter(), num_hits) for num_hits in (5, 9)]
    assert [(each.is_settled, each.num_open > 0) for each in found] == [(True, True)] * 2

    reads.released.set()
    assert run.search("the answer", Filter(), 5).num_open == 0


def test_a_file_that_cannot_be_read_is_an_error(tmp_path, monkeypatch, open_run):
    """Each request for the search raises it, and no thread waits for more."""
    run = open_run(write_run(tmp_path, [build_episode(task) for task in range(4)]))

    def fail(*_arguments):
        raise OSError("gone")

    monkeypatch.setattr(TextSearch, "_search", fail)
    for _request in range(2):
        with pytest.raises(OSError, match="gone"):
            run.search("the answer", Filter(), 4)


LETTERS = st.text(alphabet='abcKkSs@` "\\é\u00c9\u017f\u212a\U0001f600', max_size=12)


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(LETTERS, min_size=1, max_size=6), text=LETTERS.filter(lambda text: text.strip()))
def test_a_search_finds_what_the_texts_have(tmp_path_factory, texts, text):
    """Whatever the case of letters, also outside of ASCII, and with quotes and backslashes, which JSON escapes."""
    folder = tmp_path_factory.mktemp("run")
    run = RunFolder.open(write_run(folder, [build_episode(task, text=each) for task, each in enumerate(texts)]))
    try:
        found = find_all(run, text).numbers.tolist()
    finally:
        run.close()
    has = pc.match_substring(pa.array(texts), text, ignore_case=True).to_pylist()
    assert [task for task, each in enumerate(has) if each and task not in found] == []


def test_texts_with_markup_are_found(tmp_path, open_run):
    """Quotes, markup and characters without a width."""
    episodes = [
        build_episode(task, text=f"number {task * 7919} and {HOSTILE if task == 9 else ''}") for task in range(12)
    ]
    run = open_run(write_run(tmp_path, episodes))
    found = {
        text: find_all(run, text).numbers.tolist()
        for text in ("Number 63352 ", 'SRC=X onerror="document', "zero\u200bwidth")
    }
    assert list(found.values()) == [[8], [9], [9]]
    assert find_all(run, "no row has this").numbers.tolist() == []
