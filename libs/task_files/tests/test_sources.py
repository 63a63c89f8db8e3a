"""The tasks of a run's config."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from turnwise.config.file import structure_config
from turnwise.errors import ConfigError
from turnwise_task_files import describe_sources, load_sources, load_tasks

SECTIONS = {"engine": "e", "agent": "good"}


def test_validation_reads_its_own_tasks(tmp_path):
    """And without a validation set it is refused."""
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"messages": [{{"role": "user", "content": "{name}"}}]}}\n')
    sections = SECTIONS | {"rollout": {"validation": True}}
    data = {"path": "train.jsonl", "validation_path": "test.jsonl"}

    (read,) = load_tasks(structure_config(sections | {"data": data}, tmp_path))
    assert "test" == read.messages[0]["content"]
    with pytest.raises(ConfigError, match=r"data\.validation_path is not set"):
        load_tasks(structure_config(sections | {"data": {"path": "train.jsonl"}}, tmp_path))


def test_a_config_may_have_held_out_tasks_alone(tmp_path):
    """An evaluation reads them, and a run of other tasks says which key is missing."""
    (tmp_path / "test.jsonl").write_text('{"messages": [{"role": "user", "content": "test"}]}\n')
    sections = SECTIONS | {"data": {"validation_path": "test.jsonl"}}

    (read,) = load_tasks(structure_config(sections | {"rollout": {"validation": True}}, tmp_path))
    assert "test" == read.messages[0]["content"]
    for asks in (load_tasks, describe_sources):
        with pytest.raises(ConfigError, match=r"^data\.path: missing; name a file here or several in data\.sources$"):
            asks(structure_config(sections, tmp_path))


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, "single_turn"),
        ({"agent": {"name": "single_turn"}}, "single_turn"),
        ({"agent": "single_turn_agent"}, "single_turn_agent"),
        ({"agents": {"single_turn_agent": "good"}}, "single_turn_agent"),
    ],
)
@pytest.mark.parametrize("source", ["path", "sources"])
def test_the_agents_of_verl_have_their_names_here(tmp_path, sections, expected, source):
    """Each row keeps its agent; verl's default one is `single_turn`, unless the config has an agent of that name."""
    names = ["single_turn_agent", "tool_agent", "", "other"]
    rows = [json.dumps({"prompt": f"{n}?", "agent_name": name}) for n, name in enumerate(names)]
    (tmp_path / "verl.jsonl").write_text("\n".join(rows))
    data = {"path": "verl.jsonl"} if source == "path" else {"sources": [{"path": "verl.jsonl"}]}

    tasks = load_tasks(structure_config(SECTIONS | sections | {"data": data}, tmp_path))

    assert [expected, *names[1:]] == [task.agent_name for task in tasks]


def test_a_mixture_of_files(tmp_path):
    """Every row keeps its source, equal rows of two files differ in their uid, and each file has its own options."""
    question = '{"prompt": "What is 1 + 1?", "uid": "sum"}\n'
    (tmp_path / "easy.jsonl").write_text(question + '{"prompt": "2?", "uid": "two", "data_source": "gsm8k"}\n')
    (tmp_path / "more.jsonl").write_text(question + '{"prompt": "3?", "uid": "three"}\n')
    (tmp_path / "table.csv").write_text("question,uid\n4?,four\n")
    sources = [
        {"path": "easy.jsonl", "weight": 2},
        {"path": "more.jsonl", "name": "hard", "limit": 1},
        {"path": "table.csv", "columns": {"prompt": "question"}},
    ]
    config = structure_config(SECTIONS | {"data": {"sources": sources, "validation_path": "more.jsonl"}}, tmp_path)

    easy, hard, table = load_sources(config)

    assert [("sum", "easy"), ("two", "gsm8k")] == [(task.uid, task.data_source) for task in easy]
    assert [("sum-hard", "hard")] == [(task.uid, task.data_source) for task in hard]
    assert [("four", "table", "4?")] == [(task.uid, task.data_source, task.messages[0]["content"]) for task in table]
    assert [*easy, *hard, *table] == load_tasks(config)
    held_out = load_tasks(evolve(config, rollout=evolve(config.rollout, validation=True)))
    assert [("sum", ""), ("three", "")] == [(task.uid, task.data_source) for task in held_out]


_UIDS = st.sampled_from(["1", "1-2", "1-2-2", "1-b", "1-b-2", "1-b-b"])
_FILES = st.lists(st.lists(_UIDS, min_size=1, max_size=4, unique=True), min_size=2, max_size=4)
_LABELS = st.lists(st.sampled_from(["2", "b", "b-2", "c"]), min_size=4, max_size=4, unique=True)


@given(_FILES, _LABELS)
def test_no_two_tasks_of_a_mixture_have_one_uid(files, labels):
    """The first task with a uid keeps it, and each later one has a new uid that begins with its own and its source."""
    with TemporaryDirectory() as folder:
        sources = []
        for n, (uids, label) in enumerate(zip(files, labels, strict=False)):
            rows = [json.dumps({"prompt": "1 + 1?", "uid": uid}) for uid in uids]
            (Path(folder) / f"{n}.jsonl").write_text("\n".join(rows))
            sources.append({"path": f"{n}.jsonl", "name": label})
        found = load_sources(structure_config(SECTIONS | {"data": {"sources": sources}}, Path(folder)))

    given_uids = [task.uid for tasks in found for task in tasks]
    assert len(given_uids) == len(set(given_uids))
    seen: set[str] = set()
    for uids, label, tasks in zip(files, labels, found, strict=False):
        for uid, task in zip(uids, tasks, strict=True):
            assert task.uid.startswith(f"{uid}-{label}") if uid in seen else task.uid == uid
        seen.update(uids)


def test_shards_with_rows_twice_differ_in_their_uids(tmp_path):
    """A derived uid of the first shard ends as the name of the second one does."""
    row = '{"prompt": "1 + 1?", "extra_info": {"index": 0}}\n'
    (tmp_path / "1.jsonl").write_text(row * 2)
    (tmp_path / "2.jsonl").write_text(row)
    sources = [{"path": "1.jsonl"}, {"path": "2.jsonl"}]

    tasks = load_tasks(structure_config(SECTIONS | {"data": {"sources": sources}}, tmp_path))

    derived = tasks[0].uid
    assert [derived, f"{derived}-2", f"{derived}-2-2"] == [task.uid for task in tasks]
