"""A declaration that is accepted works everywhere: whatever its name is, and whatever library its values are of."""

import importlib
import inspect
import pkgutil

import pytest

import turnwise.batch
import turnwise.record
from turnwise import Trajectory
from turnwise.batch.packed_batch import collate_packed
from turnwise.batch.rollout_batch import RolloutBatch, collate
from turnwise.errors import PluginError
from turnwise.record.column_specs import ColumnSpec, check_open
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
