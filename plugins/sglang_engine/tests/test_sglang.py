"""The real SGLang: samples and log-probabilities agree with a forward pass of the model, update after update."""

import asyncio
import os
import signal

import psutil
import pytest

from turnwise.errors import ReplicaDiedError
from turnwise.protocols import Resources
from turnwise.types import FinishReason
from turnwise_sglang_engine import SglangConfig, SglangEngine
from turnwise_testing.engines.scenarios import failure_of, generate_together
from turnwise_testing.suites.served_grammars import ServedGrammarSuite
from turnwise_testing.suites.served_model import ServedModelSuite, numbered_request

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


class TestServedModel(ServedGrammarSuite, ServedModelSuite):
    """One engine for all tests. The last test kills it."""

    joint_filters = True
    num_cached_of_100 = 99
    # A part of the weights that SGLang fuses.
    partial_update = "layers.1.self_attn.k_proj"
    # The forward pass runs on one of the cores that SGLang uses too.
    num_threads = 1

    @classmethod
    def tokenizer_dir(cls):
        """The tokenizer of the calculator demo."""
        from turnwise_calculator_demo import model_dir

        return model_dir()

    @classmethod
    def make_engine(cls, model_path):
        """An engine with stop strings and small buckets."""
        config = SglangConfig(
            model=model_path,
            device="cpu",
            max_context=512,
            num_threads=1,
            stop_strings=True,
            weight_bucket_bytes=100_000,
            grammars=True,
        )
        return SglangEngine(config, Resources())

    def test_requests_sample_as_asked_in_a_mixed_batch(self, engine, runner, reference):
        """SGLang has a sampler for each of greedy, plain and filtered batches, and another for mixed ones."""
        methods = [{"temperature": 0.0}, {}, {"temperature": 0.5}, {"top_p": 0.7}, {"top_k": 3}]
        requests = [numbered_request(i, **methods[i % 5]) for i in range(20)]
        alone = [each.token_ids.tolist() for each in runner.run(generate_together(engine, requests[::5]))]

        results = runner.run(generate_together(engine, requests))

        assert alone == [each.token_ids.tolist() for each in results[::5]]
        assert {0.0} == {value for each in results[::5] for value in each.logprobs.tolist()}
        for request, result in zip(requests, results, strict=True):
            if request.sampling.temperature:
                self.assert_logprobs(reference.model(variant=0), request, result)

    def test_the_models_end_of_turn_ends_only_turns_that_ask_for_it(self, engine, runner, reference):
        """A turn continues after the tokenizer's end-of-turn id if the request does not name it."""
        eos = 2
        requests = [numbered_request(i, temperature=3.0, max_tokens=64, stop_token_ids=(361,)) for i in range(24)]

        # The samples have no seed, and one round in fifty has no end of turn. Ten such rounds in a row mean a fault.
        for _ in range(10):
            results = runner.run(generate_together(engine, requests))
            if any(eos in each.token_ids[:-1] for each in results):
                break
        else:
            pytest.fail("no turn continues after the end-of-turn id")

        for request, result in zip(requests, results, strict=True):
            assert result.finish_reason is (FinishReason.STOP if result.token_ids[-1] == 361 else FinishReason.LENGTH)
            self.assert_logprobs(reference.model(variant=0), request, result)

    def test_a_killed_scheduler_is_noticed(self, engine, runner):
        """SGLang ends its whole process if a part of it dies; running and later requests raise, and no child stays."""

        async def scenario():
            children = psutil.Process(engine._server._process.pid).children(recursive=True)
            (scheduler,) = [each for each in children if "scheduler" in " ".join(each.cmdline())]
            async with asyncio.TaskGroup() as group:
                running = engine.generate(numbered_request(0, max_tokens=400))
                waiting = group.create_task(failure_of(running, ReplicaDiedError))
                await asyncio.sleep(0.1)
                os.kill(scheduler.pid, signal.SIGKILL)
            later = await failure_of(engine.generate(numbered_request(1)), ReplicaDiedError)
            await engine.stop()
            left = [each for each in children if each.is_running() and each.status() != "zombie"]
            return str(waiting.result()), str(later), left

        waiting, later, left = runner.run(scenario())

        assert waiting.startswith("SGLang's process died: ")
        assert waiting == later
        assert left == []
