"""A declaration that is accepted works everywhere: whatever its name is, and whatever library its values are of."""

import importlib
import inspect
import json
import pkgutil

import numpy as np
import pytest
import torch

import turnwise.batch
import turnwise.record
from turnwise import Trajectory
from turnwise.batch.packed_batch import collate_packed
from turnwise.batch.rollout_batch import RolloutBatch, collate
from turnwise.errors import PluginError
from turnwise.record.column_specs import ColumnSpec, check_open
from turnwise.record.open_columns import to_plain
from turnwise_testing.inputs.small_episodes import episode


def parameter_names():
    """Return the names of all parameters of the functions of records and batches."""
    found = set()
    for package in (turnwise.record, turnwise.batch):
        for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(info.name)
            classes = [each for each in vars(module).values() if inspect.isclass(each)]
            for place in (module, *classes):
                for each in vars(place).values():
                    function = getattr(each, "__func__", each)
                    if inspect.isfunction(function) and function.__module__.startswith("turnwise."):
                        found |= set(inspect.signature(function).parameters)
    return sorted(name.lstrip("_") for name in found)


NAMES = parameter_names()


def test_the_names_are_found():
    """Among them are those of the functions that take a keyword for each column."""
    assert {"self", "ids", "origin", "versions", "num_rows", "values", "cls", "rows"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_any_name(name):
    """A name is refused where it is declared, or a record and a batch take its column, whatever they call their own."""
    spec = ColumnSpec(name=name, dtype="int16", fill=-1)
    try:
        check_open(spec)
    except PluginError:
        return
    record = Trajectory([1, 2])
    record.add_action([3], [-0.5], columns=[(spec, [7])])
    first, second = record.fork(2)
    first.add_action([4], [-0.5], columns=[(spec, [8])])
    second.add_forced([5])
    record.join((first, second))
    record = Trajectory.from_dict(record.branched(record.mark()).to_dict()).with_column(spec, [7, 8, -1])

    packed = collate_packed([episode(record)], pad_token_id=0)
    padded = collate([episode(record)], pad_token_id=0, response_length=4)
    assert [7, 8, -1] == packed.fields[name].tolist()
    for batch in (padded, padded.select([0]), RolloutBatch.from_packed(packed, response_length=4)):
        assert [[7, 8, -1, -1]] == batch.fields[name].tolist()


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({"fill": np.float32(-1)}, {"fill": -1.0}),
        ({"fill": np.finfo(np.float32).min}, {"fill": float(np.finfo(np.float32).min)}),
        ({"fill": np.float32("nan")}, {"fill": float("nan")}),
        ({"fill": np.float16("-inf")}, {"fill": float("-inf")}),
        ({"fill": np.array(-1.0)}, {"fill": -1.0}),
        ({"fill": np.longdouble(-1)}, {"fill": -1.0}),
        ({"fill": torch.tensor(-1.0)}, {"fill": -1.0}),
        ({"dtype": "int64", "fill": np.uint64(2**62)}, {"dtype": "int64", "fill": 2**62}),
        ({"dtype": "int64", "fill": torch.tensor(2**62)}, {"dtype": "int64", "fill": 2**62}),
        ({"dtype": "int32", "fill": np.int64(-1)}, {"dtype": "int32", "fill": -1}),
        ({"dtype": "int16", "fill": np.iinfo(np.int16).min}, {"dtype": "int16", "fill": -(2**15)}),
        ({"dtype": "bool", "fill": np.bool_(True)}, {"dtype": "bool", "fill": True}),
        ({"dtype": np.dtype("float32")}, {}),
        ({"dtype": np.float32}, {}),
        ({"dtype": np.dtype("<i8")}, {"dtype": "int64"}),
        ({"version": np.int64(2)}, {"version": 2}),
        ({"shape": (np.int64(2),)}, {"shape": (2,)}),
        ({"shape": np.array([2, 3])}, {"shape": (2, 3)}),
        ({"shape": [2]}, {"shape": (2,)}),
        ({"name": np.str_("x")}, {}),
        ({"tokens": np.str_("all"), "on_branch": np.str_("fill")}, {"tokens": "all", "on_branch": "fill"}),
    ],
)
def test_values_of_numpy(given, plain):
    """They become plain ones: the declaration is equal, and files take it."""
    options = {"name": "x", "dtype": "float32"}
    spec, expected = ColumnSpec(**options | given), ColumnSpec(**options | plain)

    assert (expected, hash(expected)) == (spec, hash(spec))
    assert json.dumps(expected.to_dict()) == json.dumps(spec.to_dict())
    assert spec == ColumnSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    record = Trajectory([1])
    record.add_action([2], [-0.5], columns=[(spec, spec.filled(1))])
    json.dumps(to_plain(record.to_dict())["open_columns"])


@pytest.mark.parametrize("tokens", ["sampled", "all", "none"])
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
@pytest.mark.parametrize("nothing", [[], np.array([]), np.zeros(0, np.int64), ()])
def test_no_values(tokens, shape, nothing):
    """An empty list or array is the values of no tokens, in a column of any shape."""
    spec = ColumnSpec(name="x", dtype="float32", shape=shape, tokens=tokens)
    found = spec.read(nothing)

    assert ((0, *shape), np.float32) == (found.shape, found.dtype)
    if tokens != "all":
        assert (0, *shape) == Trajectory([1, 2]).with_column(spec, nothing).column("x").shape
    if tokens != "none":
        record = Trajectory([1, 2])
        record.add_action([], [], columns=[(spec, nothing)])
        assert 2 == len(record)
