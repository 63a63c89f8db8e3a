"""The real vLLM: samples and log-probabilities agree with a forward pass of the model, update after update."""

import asyncio
import os
import signal

import pytest

from turnwise.errors import EngineError, ReplicaDiedError, TornWeightsError
from turnwise.protocols import Resources
from turnwise_engine_support.weight_checks import ExpectedWeights
from turnwise_testing.engines.scenarios import failure_of, generate_together
from turnwise_testing.suites.served_grammars import ServedGrammarSuite
from turnwise_testing.suites.served_model import ServedModelSuite, numbered_request
from turnwise_vllm_engine import VllmConfig, VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class TestServedModel(ServedGrammarSuite, ServedModelSuite):
    """One engine for all tests."""

    num_cached_of_100 = 96

    @classmethod
    def tokenizer_dir(cls):
        """The tokenizer of the calculator demo."""
        from turnwise_calculator_demo import model_dir

        return model_dir()

    @classmethod
    def make_engine(cls, model_path):
        """An engine with a small cache and small buckets."""
        config = VllmConfig(
            model=model_path,
            max_context=512,
            kv_cache_bytes=64 << 20,
            num_threads=1,
            weight_bucket_bytes=100_000,
            grammars=True,
            engine_args={"block_size": 32},
        )
        return VllmEngine(config, Resources())

    def test_greedy_logprobs_are_zero_in_any_batch(self, engine, runner):
        """vLLM has one sampler for a greedy batch and another for a mixed one."""
        alone = runner.run(generate_together(engine, [numbered_request(i, temperature=0.0) for i in range(4)]))
        mixed = [numbered_request(i, temperature=float(i >= 4)) for i in range(8)]
        mixed = runner.run(generate_together(engine, mixed))

        assert [each.token_ids.tolist() for each in alone] == [each.token_ids.tolist() for each in mixed[:4]]
        assert {0.0} == {value for each in alone + mixed[:4] for value in each.logprobs.tolist()}
        assert min(mixed[4].logprobs) < 0

    def test_a_seed_gives_the_same_ids_in_any_batch(self, engine, runner):
        """Alone, among other requests, and with a cached prefix."""
        alone = runner.run(engine.generate(numbered_request(50, seed=7)))
        crowd = [numbered_request(50, seed=7), *(numbered_request(i, seed=i) for i in range(20))]
        again = runner.run(generate_together(engine, crowd))[0]

        assert alone.token_ids.tolist() == again.token_ids.tolist()
        assert again.num_cached_tokens > 0

    def test_a_whole_update_repairs_torn_weights(self, engine, runner, reference, restore_weights):
        """vLLM fails in the last bucket, when layers have changed; nothing is served until a whole update."""
        weights = reference.weights(variant=5)
        broken = [(name, weight[:1] if name == "model.norm.weight" else weight) for name, weight in weights]
        requests = [numbered_request(i) for i in range(8)]

        async def scenario():
            expected, engine._expected = engine._expected, ExpectedWeights({})
            with pytest.raises(TornWeightsError, match="failed midway"):
                await engine.update_weights(broken, 5)
            engine._expected = expected
            with pytest.raises(TornWeightsError, match="failed midway"):
                await engine.generate(numbered_request(0))
            with pytest.raises(EngineError, match="weights are missing"):
                await engine.update_weights(weights[:1], 6)
            await engine.update_weights(weights, 5)
            return await generate_together(engine, requests)

        for request, result in zip(requests, runner.run(scenario()), strict=True):
            assert 5 == result.weight_version
            self.assert_logprobs(reference.model(variant=5), request, result)

    def test_a_killed_process_is_noticed(self, model_path, runner):
        """Requests in flight and later ones raise `ReplicaDiedError`."""
        config = VllmConfig(model=model_path, max_context=512, kv_cache_bytes=64 << 20, num_threads=1)
        engine = VllmEngine(config, Resources())

        async def scenario():
            await engine.start()
            (process,) = engine._running.llm.engine_core.resources.engine_manager.processes
            async with asyncio.TaskGroup() as group:
                running = engine.generate(numbered_request(0, max_tokens=400))
                waiting = group.create_task(failure_of(running, ReplicaDiedError))
                await asyncio.sleep(0.1)
                os.kill(process.pid, signal.SIGKILL)
            later = await failure_of(engine.generate(numbered_request(1)), ReplicaDiedError)
            await engine.stop()
            return str(waiting.result()), str(later)

        texts = runner.run(scenario())

        assert all(text.startswith("vLLM's processes have ended: EngineDeadError: ") for text in texts)
