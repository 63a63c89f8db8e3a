"""Open columns of a record: forks, joins, cuts, branches, saving and scorers."""

import asyncio
import json
import pickle

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise import GenerateResult, Trajectory
from turnwise.batch.columns import COLUMNS, ROW_NAMES
from turnwise.batch.packed_batch import PackedBatch
from turnwise.batch.rollout_batch import RolloutBatch
from turnwise.episode.requests import request_turn
from turnwise.errors import InvariantError, PluginError, TrajectoryError
from turnwise.record.column_specs import CORE_COLUMNS, TAKEN, TYPES, ColumnSpec, check_open
from turnwise.record.columns import DTYPES, Origin, is_in_turn
from turnwise.record.invariants import check_sampled, check_trajectory
from turnwise.record.open_columns import decode, encode, join_columns, to_plain
from turnwise.record.step_results import RecordedTurn
from turnwise.types import FinishReason, GenerateRequest, SamplingParams

ROUTES = ColumnSpec(name="routes", dtype="int16", shape=(2,), fill=-1, tokens="all")
TOP_K = ColumnSpec(name="top_k", dtype="float32", shape=(3,), fill=float("nan"))
ONCE = ColumnSpec(name="once", dtype="uint8", fill=7, on_branch="fill")
TEACHER = ColumnSpec(name="teacher", dtype="float32", tokens="none")
HALF = ColumnSpec(name="half", dtype="float16", fill=float("nan"))


def values(spec: ColumnSpec, seeds) -> np.ndarray:
    """Return values that differ from token to token and from column to column; the seed -1 gives the fill."""
    flat = np.outer(seeds, np.arange(1, 1 + int(np.prod(spec.shape)))) % 100
    flat = np.where(np.reshape(seeds, (-1, 1)) == -1, spec.fill, flat)
    return flat.reshape(len(seeds), *spec.shape).astype(spec.dtype)


def same(first, second) -> bool:
    return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()


@st.composite
def grown(draw: st.DrawFn):
    """Draw a record with open columns that appear at any turn, and what each sampled token was given, in order."""
    record, given_values, counter = Trajectory(range(draw(st.integers(0, 3)))), [], [0]

    def act(target, log):
        count = draw(st.integers(0, 3))
        seeds = np.arange(counter[0], counter[0] + count)
        counter[0] += count
        specs = draw(st.sampled_from([(), (ROUTES,), (TOP_K,), (ROUTES, TOP_K, ONCE)]))
        columns = [(spec, values(spec, seeds)) for spec in specs]
        target.add_action(seeds, [-0.5] * count, 1, columns=columns)
        log.extend({spec.name: value[i] for spec, value in columns} for i in range(count))

    def step(target, log):
        kind = draw(st.sampled_from(["act", "observe", "force"]))
        if kind == "act":
            act(target, log)
        else:
            (target.add_observation if kind == "observe" else target.add_forced)(range(draw(st.integers(0, 2))))

    for _ in range(draw(st.integers(0, 4))):
        if draw(st.booleans()):
            step(record, given_values)
            continue
        paths, logs = record.fork(draw(st.integers(1, 3))), []
        for path in paths:
            logs.append([])
            for _step in range(draw(st.integers(0, 2))):
                step(path, logs[-1])
        if draw(st.booleans()):
            record = Trajectory.from_dict(json.loads(json.dumps(_plain(record))))
            paths = record.open_paths
        record.join(paths)
        given_values += [each for log in logs for each in log]
    return record, given_values


def _plain(record: Trajectory):
    """Return a saved record as a file of JSON has it."""

    def plain(value):
        if isinstance(value, dict):
            return {name: plain(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        return value.tolist() if isinstance(value, np.ndarray) else value

    return plain(to_plain(record.to_dict()))


def assert_given(record: Trajectory, given_values) -> None:
    """Each sampled token has its given value, and every other one has the fill."""
    turns = is_in_turn(record.origins)
    for name, spec in record.columns.items():
        column = record.column(name)[len(record.column(name)) - record.num_response_tokens :]
        assert spec.is_fill(column[~turns]).all()
        expected = [each.get(name, spec.filled(1)[0]) for each in given_values]
        assert same(column[turns], np.array(expected, spec.dtype).reshape(-1, *spec.shape))
    assert {name for each in given_values for name in each} <= set(record.columns)


@settings(max_examples=60, deadline=None)
@given(grown(), st.integers(0, 12), st.data())
def test_values_stay_at_their_tokens(drawn, budget, data):
    """Through forks, joins, saving with open paths, pickling, a cut, a mark and a branch."""
    record, given_values = drawn
    check_trajectory(record)
    assert_given(record, given_values)
    assert_given(pickle.loads(pickle.dumps(record)), given_values)
    assert_given(record.rewound(record.mark()), given_values)

    cut = record.truncated(budget)
    check_trajectory(cut)
    assert_given(cut, given_values[: int(is_in_turn(record.origins[:budget]).sum())])

    branch = record.branched(record.mark())
    turns = is_in_turn(record.origins)
    for name, spec in record.columns.items():
        kept, own = branch.column(name), record.column(name)
        if spec.on_branch == "keep":
            assert same(own, kept)
        else:
            assert spec.is_fill(kept[len(kept) - len(turns) :][turns]).all()
    seed = data.draw(st.integers(0, 9))
    branch.add_action([seed], [-0.5], 1, columns=[(TOP_K, values(TOP_K, [seed]))])
    assert same(branch.column("top_k")[-1:], values(TOP_K, [seed]))


def test_values_of_the_context():
    """A column of all tokens takes those of the context from the answer, where the record has none."""
    record = Trajectory([1, 2])
    record.add_action([3], [-0.5], columns=[(ROUTES, values(ROUTES, [1, 2, 3]))])
    view = record.column("routes")
    record.add_observation([4])
    record.add_action([5], [-0.5], columns=[(ROUTES, values(ROUTES, [11, 12, 13, 14, 15]))])
    assert same(record.column("routes"), values(ROUTES, [1, 2, 3, 14, 15]))
    assert same(view, values(ROUTES, [1, 2, 3]))  # a view stays as it was

    first, second = record.fork(2)
    first.add_forced([6])
    first.add_action([7], [-0.5], columns=[(ROUTES, values(ROUTES, range(20, 27)))])
    second.add_action([8], [-0.5], columns=[(ROUTES, values(ROUTES, [30]))])
    record.join((first, second))
    assert same(record.column("routes"), values(ROUTES, [1, 2, 3, 14, 15, 25, 26, 30]))


@pytest.mark.parametrize(
    ("spec", "given_values", "text"),
    [
        (TOP_K, np.zeros((2, 3)), "column 'top_k' has 2 values for 1 tokens"),
        (TOP_K, np.zeros((1, 2)), r"column 'top_k' has values of shape \(1, 2\), expected \(n, 3\)"),
        (TOP_K, np.zeros((4, 3)), "column 'top_k' has 4 values for 1 tokens"),
        (ROUTES, np.full((1, 2), 40_000), "column 'routes' has values of int64 that are no int16"),
        (ONCE, [1.5], "column 'once' has values of float64 that are no uint8"),
        (TEACHER, [1.0], "column 'teacher' has no values of sampled tokens: a scorer gives them"),
        (HALF, [70_000.0], "column 'half' has values of float64 that are no float16"),
        (HALF, [1e300], "column 'half' has values of float64 that are no float16"),
        (HALF, [1 + 2j], "column 'half' has values of complex128, expected numbers"),
        (HALF, ["0.5"], "column 'half' has values of <U3, expected numbers"),
        (HALF, [None], "column 'half' has values of object, expected numbers"),
        (HALF, np.zeros(1, "datetime64[s]"), r"column 'half' has values of datetime64\[s\], expected numbers"),
        (ONCE, [2**70], "column 'once' has values of object, expected numbers"),
        (TOP_K, [[1, 2, 3], [4]], "column 'top_k' has values that are no array of numbers: .*inhomogeneous shape.*"),
        (HALF, torch.zeros(1, dtype=torch.bfloat16), "column 'half' has values that are no array of numbers: .*"),
        (HALF, torch.zeros(1, requires_grad=True), "column 'half' has values that are no array of numbers: .*"),
    ],
)
def test_values_that_do_not_fit(spec, given_values, text):
    """The error names the column, and the record stays as it was."""
    record = Trajectory([1, 2, 3])
    with pytest.raises(TrajectoryError, match=f"^{text}$"):
        record.add_action([4], [-0.5], columns=[(spec, given_values)])
    assert (3, {}) == (len(record), record.columns)


@pytest.mark.parametrize("given_values", [[np.inf], [-np.inf], [np.nan], [0.1], [65_504], [True], np.array([2], ">i4")])
def test_values_that_a_float_rounds(given_values):
    """Rounded numbers, infinite ones and nan are values of a float; only numbers that are too large are not."""
    record = Trajectory([1])
    record.add_action([4], [-0.5], columns=[(HALF, given_values)])
    assert same(np.asarray(given_values).astype(np.float16), record.column("half"))


def test_another_declaration_of_a_column():
    """A resumed record whose plugin has changed is not continued with other values."""
    record = Trajectory([1])
    record.add_action([2], [-0.5], columns=[(ONCE, [1])])
    other = ColumnSpec(name="once", dtype="uint8", fill=7, on_branch="fill", version=2)
    with pytest.raises(TrajectoryError, match="column 'once' is declared otherwise than in the record"):
        record.add_action([3], [-0.5], columns=[(other, [1])])
    with pytest.raises(TrajectoryError, match="column 'once' is declared otherwise than in the record"):
        record.with_column(other, [1])


def test_a_scorer_fills_a_column():
    """It gives values of response tokens, of all tokens, or of sampled ones alone."""
    record = Trajectory([1])
    record.add_action([2], [-0.5])
    record.add_observation([3])
    scored = record.with_column(TEACHER, [0.5, 0.25]).with_column(ROUTES, values(ROUTES, [1, 2, 3]))
    assert [0.5, 0.25] == scored.column("teacher").tolist()
    assert same(scored.column("routes"), values(ROUTES, [1, 2, 3]))
    assert {} == record.columns
    assert [1.0, 0.0] == scored.with_column(TEACHER, [1, 0]).column("teacher").tolist()
    assert same(record.with_column(ONCE, [1, 7]).column("once"), np.array([1, 7], np.uint8))
    with pytest.raises(TrajectoryError, match="a value of a token that the policy did not sample"):
        record.with_column(ONCE, [1, 2])
    with pytest.raises(TrajectoryError, match="column 'teacher' has 3 values for 2 tokens"):
        record.with_column(TEACHER, [1, 2, 3])
    with pytest.raises(PluginError, match="every record or batch has something of that name"):
        record.with_column(ColumnSpec(name="logprobs", dtype="float32"), [1, 2])


def test_the_engine_and_the_record_are_compared():
    """A value that differs from the engine's ends the episode with an error of the core."""
    results = [
        GenerateResult(token_ids=[2], logprobs=[-0.5], finish_reason=FinishReason.STOP, columns=columns)
        for columns in ({"top_k": values(TOP_K, [5])}, None)
    ]
    record = Trajectory([1])
    for result in results:
        given_columns = [(TOP_K, each) for each in (result.columns or {}).values()]
        record.add_action(result.token_ids, result.logprobs, columns=given_columns)
    check_sampled(record, results)
    with pytest.raises(InvariantError, match="the recorded values of column 'top_k' differ from the engine's"):
        check_sampled(record, [results[0], results[0]])


def test_the_last_token_of_a_turn():
    """No engine has run it yet: it takes its value from the next request, and a resumed record still passes."""
    record = Trajectory([1])
    answers = [values(ROUTES, [1, 2, -1]), values(ROUTES, [91, 92, 3, 4, 5, -1])]
    record.add_action([2, 3], [-0.5] * 2, columns=[(ROUTES, answers[0])])
    record.add_observation([4])
    record.add_action([5, 6], [-0.5] * 2, columns=[(ROUTES, answers[1])])
    assert same(record.column("routes"), values(ROUTES, [1, 2, 3, 4, 5, -1]))
    ids = iter([[2, 3], [5, 6]])
    results = [
        GenerateResult(
            token_ids=next(ids), logprobs=[-0.5] * 2, finish_reason=FinishReason.STOP, columns={"routes": answer}
        )
        for answer in answers
    ]
    check_sampled(record, results)
    with pytest.raises(InvariantError, match="the recorded values of column 'routes' differ from the engine's"):
        check_sampled(record, [results[0], evolve(results[1], columns=results[0].columns)])


def test_two_parts_of_a_turn():
    """The second part of an interrupted turn adds its new values, and both parts have the same columns."""

    def part(size, columns):
        return GenerateResult(
            token_ids=range(size), logprobs=[-0.5] * size, finish_reason=FinishReason.STOP, columns=columns
        )

    first, rest = values(ROUTES, [1, 2, 3]), values(ROUTES, [91, 92, 93, 4])
    joined = join_columns(part(1, {"routes": first}), part(1, {"routes": rest}))
    assert same(joined["routes"], values(ROUTES, [1, 2, 3, 4]))
    lacking, specs = values(ROUTES, [1, -1]), {"routes": ROUTES}
    joined = join_columns(part(2, {"routes": lacking}), part(1, {"routes": rest}), specs)
    assert same(joined["routes"], values(ROUTES, [1, 93, 4]))
    assert join_columns(part(1, None), part(1, None)) is None
    assert same(join_columns(part(0, None), part(1, {"routes": rest}))["routes"], rest)
    with pytest.raises(TrajectoryError, match="the column 'routes' for one part of a turn and not for the other"):
        join_columns(part(1, {"routes": first}), part(1, None))


def test_a_turn_whose_plugin_has_changed():
    """Values of two versions are not joined in one turn; a turn with nothing left keeps its own declaration."""
    newer = {"once": evolve(ONCE, version=2)}
    rest = GenerateResult(token_ids=[3], logprobs=[-0.5], finish_reason=FinishReason.STOP, columns={"once": [2]})
    answered = []

    async def send(request):
        answered.append(request)
        return rest

    def turn(token_ids, specs, max_tokens=2):
        first = evolve(rest, token_ids=token_ids, logprobs=[-0.5] * len(token_ids), finish_reason=FinishReason.ABORT)
        first = evolve(first, columns={"once": np.ones(len(token_ids), np.uint8)})
        saved = RecordedTurn(position=(1, 1, -1, 1), result=first, specs={"once": ONCE} if len(token_ids) else {})
        sampling = SamplingParams(max_tokens=max_tokens)
        request = GenerateRequest(request_id="r", trajectory_id="t", token_ids=[1], sampling=sampling)
        return asyncio.run(request_turn(request, saved.position, saved, send, specs))

    for specs in ({"once": ONCE}, {"once": ONCE, "routes": ROUTES}):
        joined = turn([2], specs)
        assert ({"once": ONCE}, [1, 2]) == (joined.specs, joined.result.columns["once"].tolist())
    assert newer == turn([], newer).specs  # nothing was sampled before
    assert {"once": ONCE} == turn([2], newer, max_tokens=1).specs
    answered.clear()
    with pytest.raises(TrajectoryError, match="column 'once' is declared otherwise than in the first part of its turn"):
        turn([2], newer)
    assert not answered


@pytest.mark.parametrize("dtype", TYPES)
def test_values_as_text(dtype):
    """Every type comes back exactly, and damaged text is refused."""
    array = np.arange(6).reshape(3, 2).astype(dtype)
    assert same(array, decode(json.loads(json.dumps(encode(array)))))
    for damage in ({"data": "?"}, {"dtype": "object"}, {"shape": [4, 2]}, {"shape": "x"}):
        with pytest.raises(TrajectoryError, match="the values of a column are damaged"):
            decode(encode(array) | damage)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"name": "Routes"}, "lower-case letters"),
        ({"dtype": "complex64"}, "has the type 'complex64', expected one of"),
        ({"shape": (0,)}, r"has the shape \(0,\), expected numbers from 1"),
        ({"tokens": "some"}, "tokens='some'"),
        ({"shape": 3}, "has the shape 3, expected numbers from 1"),
        ({"shape": (True,)}, r"has the shape \(True,\), expected numbers from 1"),
        ({"tokens": ["all"]}, r"tokens=\['all'\]"),
        ({"version": "2"}, "has the version '2', expected an integer"),
        ({"fill": 300}, "has the fill 300, which is no uint8"),
        ({"fill": "x"}, "has the fill x, which is no uint8"),
        ({"fill": None}, "has the fill None, which is no uint8"),
        ({"fill": [0]}, r"has the fill \[0\], which is no uint8"),
        ({"fill": float("nan")}, "has the fill nan, which is no uint8"),
        ({"fill": 10**400}, "has the fill 10+, which is no uint8"),
        ({"dtype": "float16", "fill": 1e6}, "has the fill 1000000.0, which is no float16"),
    ],
)
def test_wrong_declarations(options, text):
    """The error is one line that names the column."""
    with pytest.raises(PluginError, match=f"^column '.*{text}[^\n]*$"):
        ColumnSpec(**{"name": "x", "dtype": "uint8"} | options)


def test_declarations_in_files():
    """One comes back, also with a fill that is not equal to itself; a damaged one is refused."""
    for spec in (ROUTES, TOP_K, ONCE, TEACHER):
        back = ColumnSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
        assert (spec, hash(spec)) == (back, hash(back))
    large = [ColumnSpec(name="x", dtype="int64", fill=2**53 + step) for step in (0, 1)]
    assert large[0] != large[1] == ColumnSpec.from_dict(json.loads(json.dumps(large[1].to_dict())))
    assert ROUTES == ColumnSpec.from_dict(ROUTES.to_dict() | {"shape": np.array(ROUTES.shape), "fill": -1.0})
    with pytest.raises(PluginError, match="the declaration of a column is damaged"):
        ColumnSpec.from_dict({"name": "x", "fill": 0, "kind": 1})


def test_the_core_declares_its_own():
    """In the same class: the types of the record follow from it, and no plugin may take a name."""
    assert {name: np.dtype(spec.dtype) for name, spec in CORE_COLUMNS.items()} == {
        name: np.dtype(dtype) for name, dtype in DTYPES.items()
    }
    record = Trajectory([1])
    record.add_action([2], [-0.5], 4)
    saved = record.to_dict()
    for name, spec in CORE_COLUMNS.items():
        assert spec.dtype == saved[name].dtype
    assert CORE_COLUMNS["weight_versions"].fill == saved["weight_versions"][0]
    public = {name for name in {*dir(RolloutBatch), *dir(PackedBatch)} if not name.startswith("_")}
    assert {*CORE_COLUMNS, *COLUMNS, *ROW_NAMES, *public} <= TAKEN
    for name in sorted(TAKEN):
        with pytest.raises(PluginError, match=f"^column '{name}': every record or batch has something of that name"):
            check_open(ColumnSpec(name=name, dtype="uint8"))
    assert Origin.PROMPT == CORE_COLUMNS["origins"].fill
