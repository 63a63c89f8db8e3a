"""Signatures of texts: they exclude rows without a searched text, and never a row that has it."""

import threading

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import given
from hypothesis import strategies as st
from viewer_runs import HOSTILE, build_episode, several_records, write_run

from turnwise_viewer.episode_index import Filter
from turnwise_viewer.row_groups import open_groups
from turnwise_viewer.run_folder import RunFolder
from turnwise_viewer.text_search import TextSearch
from turnwise_viewer.text_signatures import TextSignatures

LETTERS = st.text(alphabet='abcKkSs@` "\\é\u00c9\u017f\u212a\U0001f600', max_size=12)


@given(rows=st.lists(st.none() | LETTERS, min_size=1, max_size=9), text=LETTERS.filter(bool))
def test_a_row_with_the_text_is_never_excluded(rows, text):
    """Whatever the search without regard to case finds, also outside of ASCII, the signatures let through."""
    table = pa.table({"messages": pa.array(["x"] * len(rows)), "text": pa.array(rows, pa.string())})
    signatures = TextSignatures()
    signatures.add(table.slice(0, 0))
    signatures.add(table)

    has = pc.fill_null(pc.match_substring(table["text"], text, ignore_case=True), False).to_pylist()
    may_have = signatures.may_have(1, text).tolist()

    assert [may for may, found in zip(may_have, has, strict=True) if found and not may] == []
    assert len(signatures.may_have(0, text)) == 0


def test_other_rows_are_excluded():
    """Of two hundred texts, the signatures keep the one that has all parts of the searched text."""
    texts = [f"the answer of task {number} is {number * 7919}" for number in range(200)]
    signatures = TextSignatures()
    signatures.add(pa.table({"text": pa.chunked_array([texts[:50], texts[50:]])}))

    found = signatures.may_have(0, "IS 950280").nonzero()[0].tolist()

    assert 120 in found
    assert len(found) < 5


def find_all(run, text):
    """Return the hits of a complete search."""
    while (found := run.search(text, Filter(), len(run.index))).num_open:
        pass
    run.close()
    return found.numbers.tolist()


def test_a_search_reads_only_groups_that_may_have_the_text(tmp_path, monkeypatch):
    """With signatures a search finds the same, also quotes in JSON, and reads the groups with hits alone."""
    episodes = [
        build_episode(task, text=f"number {task * 7919} and {HOSTILE if task == 9 else ''}") for task in range(40)
    ]
    write_run(tmp_path, [*episodes, several_records(40)])
    read = []
    search = TextSearch._search
    monkeypatch.setattr(
        TextSearch, "_search", lambda self, groups, batch: read.extend(batch) or search(self, groups, batch)
    )
    texts = ["Number 158380", 'SRC=X onerror="document', "zero\u200bwidth", "nothing", "an", "history was rewritten"]
    run = RunFolder.open(tmp_path)
    without = [find_all(run, text) for text in texts]
    num_groups = len(open_groups(tmp_path / "trajectories.parquet").sizes)
    assert read == [*range(num_groups)] * len(texts)
    read.clear()

    run.sign_texts(threading.Event(), min_groups=1)

    assert [find_all(run, text) for text in texts] == without
    assert without[:3] == [[20], [9], [9]]
    read.clear()
    assert find_all(run, texts[0]) == [20]
    assert read == [5]
    assert find_all(run, "no row has this") == []
    assert read == [5]


def test_a_stop_ends_the_signing_and_a_new_file_begins_anew(tmp_path):
    """A stopped signer leaves the rest to the next one; a run that is replaced has none of the old signatures."""
    write_run(tmp_path, [build_episode(task) for task in range(12)])
    run = RunFolder.open(tmp_path)
    stopped = threading.Event()
    stopped.set()
    run.sign_texts(stopped, min_groups=1)
    assert len(run._signatures) == 0
    run.sign_texts(threading.Event(), min_groups=4)
    assert len(run._signatures) == 0
    run.sign_texts(threading.Event(), min_groups=1)
    assert len(run._signatures) == 3

    write_run(tmp_path, [build_episode(task, text="other") for task in range(12)])
    assert run.refresh()

    assert len(run._signatures) == 0
    assert find_all(run, "other") == [*range(12)]


def test_a_column_without_texts_is_signed():
    """Null texts, and a group without any text, exclude everything but a text that is too short to look at."""
    signatures = TextSignatures()
    signatures.add(pa.table({"a": pa.nulls(3, pa.string()), "b": pa.array(["", None, "ab"])}))

    assert signatures.may_have(0, "abc").tolist() == [False] * 3
    assert signatures.may_have(0, "ab").tolist() == [True] * 3
