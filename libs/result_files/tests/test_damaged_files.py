"""Files that another program has changed, and values of plugins that no file has a place for."""

import copy
import json

import pytest

from turnwise.errors import DataError
from turnwise.record.result import EpisodeResult
from turnwise.record.spec import EpisodeSpec, UnfinishedEpisode
from turnwise.record.trajectory import Trajectory
from turnwise.types import SamplingParams, Status, Task, TrajectoryScore
from turnwise_result_files import TrajectoryWriter, load_unfinished, read_results
from turnwise_result_files.resumption import earlier_run
from turnwise_result_files.unfinished import save_unfinished

REPLACEMENTS = [
    *(None, 3, -1, 2**70, 1.5, "x", "", [], {}, [[]], [None], True, {"a": 1}, "9" * 5000, [2**40], ["a"], [3], [1.5]),
]
TOO_DEEP = ("[" * 100_000, '{"a":' * 100_000)


class Unprintable:
    """An object without a text."""

    def __str__(self):
        raise RuntimeError

    __repr__ = __str__


def nested(depth):
    """Return a list in a list, so many times."""
    value = []
    for _ in range(depth):
        value = [value]
    return value


CIRCLE = []
CIRCLE.append(CIRCLE)
ODD = {
    "deep": nested(3000),
    "circle": CIRCLE,
    "object": Unprintable(),
    "huge": 10**6000,
    "key": {(1, 2): 3},
    "set": {1},
    "nan": float("nan"),
}


def spec_of(**columns):
    return EpisodeSpec(
        task=Task(messages=({"role": "user", "content": "x"},), uid="u", **columns),
        agent_name="a",
        sampling=SamplingParams(),
    )


def damaged(line):
    """Yield a line of JSON once with every value removed, and with every value replaced by each odd one."""

    def paths(value, path=()):
        yield path
        for key in value if isinstance(value, dict) else range(min(1, len(value))) if isinstance(value, list) else ():
            yield from paths(value[key], (*path, key))

    row = json.loads(line)
    for path in [path for path in paths(row) if path]:
        for value in (..., *REPLACEMENTS):
            changed = copy.deepcopy(row)
            place = changed
            for key in path[:-1]:
                place = place[key]
            if value is ...:
                del place[path[-1]]
            else:
                place[path[-1]] = value
            yield json.dumps(changed)


def errors_of(read, path, before, lines):
    """Read a file once with each line; return the kinds of errors other than `DataError`."""
    found = set()
    for line in lines:
        path.write_text(f"{before}{line}\n")
        try:
            read(path)
        except DataError:
            continue
        except Exception as error:  # noqa: BLE001 - the errors that this test looks for
            found.add(f"{type(error).__name__}: {error}"[:80])
    return found


@pytest.mark.slow
def test_a_damaged_row_is_one_line(tmp_path):
    """Whatever value of a row was replaced, the file is read or its error names the row."""
    record = Trajectory([1, 2])
    record.add_action([3, 4], [-0.5, -0.25], 2)
    record.add_observation([5])
    path = tmp_path / "t.jsonl"
    with TrajectoryWriter(path) as writer:
        scores = (TrajectoryScore(value=1.0),)
        writer.write(EpisodeResult(task=spec_of().task, status=Status.COMPLETED, trajectories=(record,), scores=scores))

    assert errors_of(read_results, path, "", [*damaged(path.read_text()), *TOO_DEEP]) == set()


def test_a_damaged_unfinished_episode_is_one_line(tmp_path):
    """The same for the file of unfinished episodes, and for its first line."""
    path = tmp_path / "unfinished.jsonl"
    save_unfinished(path, [UnfinishedEpisode(spec=spec_of(), started=True)])
    header, line = path.read_text().splitlines()

    assert errors_of(load_unfinished, path, f"{header}\n", [*damaged(line), *TOO_DEEP]) == set()
    assert errors_of(load_unfinished, path, "", [f"{each}\n{line}" for each in damaged(header)]) == set()


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
@pytest.mark.parametrize("place", ["memory", "tool_notes", "ground_truth", "extra"])
def test_odd_notes_cost_no_other_episode(tmp_path, place, value):
    """The episode with them starts again from its prompt, and the others of the file continue."""
    odd = {"a": value}
    spec = spec_of(**{place: odd}) if place in ("ground_truth", "extra") else spec_of()
    notes = {} if place in ("ground_truth", "extra") else {place: odd}
    episodes = [UnfinishedEpisode(spec=spec, started=True, **notes), UnfinishedEpisode(spec=spec_of(), started=True)]

    save_unfinished(tmp_path / "unfinished.jsonl", episodes)

    first, second = load_unfinished(tmp_path / "unfinished.jsonl")
    assert (first.started, second.started) == (False, True)
    assert first.spec.task.messages == spec.task.messages


@pytest.mark.parametrize("metrics", ["", "[", "3", "[]", "null", "{}", '{"wall_s": "x"}', '{"wall_s": []}'])
def test_damaged_metrics_only_lose_the_time(tmp_path, metrics):
    """A run is resumed without the seconds of its earlier parts."""
    (tmp_path / "metrics.json").write_text(metrics)
    assert earlier_run(tmp_path, [spec_of()], None).wall_s is None


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_first_changed_task_is_named(tmp_path, order):
    """Episodes end in any order, and the error names the first changed row of the data set in each."""

    def spec(row, text):
        task = Task(messages=({"role": "user", "content": text},), uid=f"u{row}", sample_index=row)
        return EpisodeSpec(task=task, agent_name="a", sampling=SamplingParams())

    unfinished = [UnfinishedEpisode(spec=spec(row, "x"), started=True) for row in order]
    save_unfinished(tmp_path / "unfinished.jsonl", unfinished)

    with pytest.raises(DataError, match=r"row 1 has changed since episode 'u1/0' ran"):
        earlier_run(tmp_path, [spec(0, "x"), spec(1, "y"), spec(2, "y")], None)
