"""Memory that sleep frees and waking up restores."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from attrs import frozen

from turnwise.errors import EngineError
from turnwise.protocols.weights import TensorSpec, Weight
from turnwise_testing.probes.mapped_files import resident_bytes
from turnwise_transformers_engine.weights import updates

PROGRAM = Path(__file__).with_name("memory_program.py")
MIB = 2**20


@frozen
class PlainSource:
    """A `WeightSource` of an iteration."""

    specs: tuple[TensorSpec, ...]
    read: Callable[[], Iterator[Weight]]

    def __iter__(self):
        return self.read()


@pytest.fixture(scope="module")
def large_model(tmp_path_factory):
    """The directory of a Llama with 200 MiB of weights, the bytes of its weights, and those of a full cache."""
    config = transformers.LlamaConfig(
        vocab_size=48000,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    directory = tmp_path_factory.mktemp("large")
    model.save_pretrained(directory)
    weights = sum(weight.nbytes for weight in model.parameters())
    return directory, weights, 2 * 4096 * 2 * 2 * 8 * 64 * 4


@pytest.mark.slow
def test_memory_of_each_level(large_model, decoder):
    """Level 1 frees the cache, level 2 also the weights; each tag restores its own memory."""
    directory, weights_bytes, cache_bytes = large_model
    # A separate process, because memory that other tests have left free is not always returned to the system, and
    # the engine's next allocation then adds less than its size to the resident memory.
    command = [sys.executable, PROGRAM, directory, decoder]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    used, before, after = json.loads(done.stdout)

    print({name: f"{number / MIB:.0f} MiB" for name, number in used.items()})
    assert before == after
    assert used["awake"] - used["level 1"] > 0.8 * cache_bytes
    assert used["level 1"] - used["level 2"] > 0.9 * weights_bytes
    assert 0.9 * weights_bytes < used["weights awake"] - used["level 2"] < weights_bytes + 0.5 * cache_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which pages were written")
def test_copied_weights_have_no_pages_of_the_file(tiny_model, serve, ask, tmp_path):
    """The fused decoder has a copy of some weights; their pages of the model's file are not in memory beside it."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")  # other tests map the fixture's file
    file = folder / "model.safetensors"

    async def scenario(engine):
        started = resident_bytes(file)
        await engine.generate(ask())
        used = resident_bytes(file)
        await engine.sleep(1)
        return started, used, resident_bytes(file)

    started, used, asleep = serve(folder, scenario)

    assert 0 == started == asleep < used


def test_level_2_needs_every_weight(tiny_model, other_weights, serve, ask):
    """Requests are refused until updates have loaded all weights."""

    async def scenario(engine):
        await engine.sleep(2)
        await engine.wake_up()
        texts = []
        for weights in ([], other_weights[:1]):
            await engine.update_weights(weights, 1)
            with pytest.raises(EngineError) as refusal:
                await engine.generate(ask())
            texts.append(str(refusal.value))
        await engine.update_weights(other_weights[1:], 2)
        return texts, len((await engine.generate(ask())).token_ids)

    texts, num_tokens = serve(tiny_model, scenario)

    assert [f"lacks {n} weights" in text for n, text in zip((25, 24), texts, strict=True)] == [True, True]
    assert num_tokens == 16


def test_level_2_stages_no_second_copy(
    tiny_model, other_model, other_weights, serve, ask, assert_logprobs, monkeypatch
):
    """Whole weights go from the source to the empty memory; a source that fails midway leaves all of them missing."""
    staged = []
    monkeypatch.setattr(updates, "_stage", lambda *arguments: staged.append(arguments) or iter(()))
    specs = tuple(TensorSpec(name, weight.shape, str(weight.dtype)) for name, weight in other_weights)

    def read(last):
        for number, (_name, weight) in enumerate(other_weights):
            if number == last:
                raise OSError("the source failed")
            yield specs[number].name, torch.from_numpy(weight)

    async def scenario(engine):
        await engine.sleep(2)
        await engine.wake_up()
        with pytest.raises(EngineError, match="the source failed"):
            await engine.update_weights(PlainSource(specs, lambda: read(3)), 1)
        with pytest.raises(EngineError, match=f"lacks {len(other_weights)} weights"):
            await engine.generate(ask())
        await engine.update_weights(PlainSource(specs, lambda: read(None)), 2)
        return await engine.generate(ask())

    assert_logprobs(serve(tiny_model, scenario), other_model)
    assert [] == staged


def test_requests_during_sleep_are_refused(tiny_model, serve, ask, in_flight):
    """No request starts between the aborts and the end of `sleep`, also in repeated cycles."""

    async def late(engine, number):
        try:
            return (await engine.generate(ask(f"late {number}"))).finish_reason
        except EngineError as error:
            return "asleep" if "asleep" in str(error) else str(error)

    async def scenario(engine):
        ends = []
        # A copy, because level 2 leaves the weights uninitialised.
        state = {name: tensor.clone() for name, tensor in engine._backend.model.state_dict().items()}
        for cycle in range(5):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(engine.generate(ask(f"{cycle}.{i}", max_tokens=200))) for i in range(3)]
                await in_flight(engine, f"{cycle}.0")
                asleep = group.create_task(engine.sleep(2 if cycle % 2 else 1))
                await asyncio.sleep(0)
                tasks += [group.create_task(late(engine, f"{cycle}.{i}")) for i in range(3)]
            ends += [getattr(task.result(), "finish_reason", task.result()) for task in tasks]
            assert asleep.done()
            await engine.wake_up(["weights"])
            await engine.update_weights([(name, tensor.numpy()) for name, tensor in state.items()], cycle + 1)
            await engine.wake_up(["kv_cache"])
        await engine.generate(ask("last"))
        return Counter(ends), engine.stats()["num_running"]

    ends, num_running = serve(tiny_model, scenario)

    assert (ends, num_running) == ({"abort": 15, "asleep": 15}, 0)
