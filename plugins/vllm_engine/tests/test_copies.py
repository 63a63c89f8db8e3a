"""New weights for workers on other machines: one worker of each gets a copy, and the others open that."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from turnwise.errors import EngineError
from turnwise_engine_support.stored_weights import map_weights
from turnwise_testing.engines.scenarios import failure_of
from turnwise_vllm_engine import copies
from turnwise_vllm_engine.copies import Copies, choose_holders, copy_files, local_places, machine_id

WEIGHTS = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b.weight": np.ones(5, np.float32)}


@pytest.fixture
def model(tmp_path):
    """The directory of a model with two weights."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 32}')
    save_file({name: np.zeros_like(array) for name, array in WEIGHTS.items()}, tmp_path / "model" / "m.safetensors")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        (["own", "own"], {}),
        (["own", "own", "x", "x", "y"], {2: "x", 4: "y"}),
        (["x", "own", "x"], {0: "x"}),
    ],
)
def test_the_first_worker_of_each_other_machine_holds_the_copies(machines, expected):
    """Workers on the replica's machine open its files."""
    assert expected == choose_holders(machines, "own")


def test_processes_of_one_machine_have_one_id():
    """The id is no path and no process id, which other machines may have, too."""
    assert machine_id() == machine_id()


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_copies_have_the_bytes_of_their_files(tmp_path, monkeypatch, chunk):
    """Whatever the size of a chunk; each file travels once, and only holders keep it."""
    monkeypatch.setattr(copies, "CHUNK_BYTES", chunk)
    (tmp_path / "one").write_bytes(bytes(range(200)))
    (tmp_path / "two").write_bytes(b"\xff" * 33)
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    places = [("a", "uint8", [3], one, 0), ("b", "uint8", [2], two, 31), ("c", "uint8", [4], one, 196)]
    held = {1: Copies(), 3: Copies()}

    async def call(method, args):
        assert method == "turnwise_copy"
        holders, *part = args
        return [held[rank].write(*part) if rank in holders else "" for rank in range(4)]

    paths = asyncio.run(copy_files(places, {1: "x", 3: "y"}, call))

    for machine in ("x", "y"):
        assert {path: Path(path).read_bytes() for path in (one, two)} == {
            path: Path(copy).read_bytes() for path, copy in paths[machine].items()
        }
        found = {name: tensor.tolist() for name, tensor in map_weights(local_places(places, paths[machine]))}
        assert {"a": [0, 1, 2], "b": [255, 255], "c": [196, 197, 198, 199]} == found
    for each in held.values():
        each.close()
        each.close()


def test_an_update_reaches_another_machine(make_fake_engine, llm, model):
    """The copies are made before generation pauses, and freed after the update."""
    llm.machines = [machine_id(), "other", "other"]

    async def scenario():
        engine = make_fake_engine(model=model)
        await engine.start()
        await engine.update_weights(WEIGHTS.items(), 1)
        await engine.stop()

    asyncio.run(scenario())

    assert {name: array.tolist() for name, array in WEIGHTS.items()} == {
        name: array.tolist() for name, array in llm.loaded.items()
    }
    assert [1] == list(llm.copies)
    order = ["turnwise_describe", "turnwise_copy", "pause", "turnwise_load", "resume", "turnwise_drop_copies"]
    assert [*order, "shutdown"] == llm.calls


def test_a_failed_copy_changes_nothing(make_fake_engine, llm, model):
    """The old weights are served, and the next update works."""
    llm.machines = [machine_id(), "other"]

    async def scenario():
        engine = make_fake_engine(model=model)
        await engine.start()
        llm.fail_next_load = OSError("no room")
        error = await failure_of(engine.update_weights(WEIGHTS.items(), 1))
        assert type(error) is EngineError
        before = engine.stats()["weight_version"]
        await engine.update_weights(WEIGHTS.items(), 2)
        await engine.stop()
        return str(error), before, engine.stats()["weight_version"]

    expected = ("cannot copy the new weights to other machines: OSError: no room", 0, 2)
    assert expected == asyncio.run(scenario())
