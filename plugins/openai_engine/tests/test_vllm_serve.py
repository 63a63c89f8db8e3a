"""A real vLLM server on loopback, when vLLM is installed: token ids in and out over HTTP."""

import asyncio
import importlib.util
import os
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from turnwise.errors import EngineError
from turnwise.protocols import Resources
from turnwise.types import FinishReason, GenerateRequest, SamplingParams
from turnwise_openai_engine import OpenAIConfig, OpenAIEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed in this environment"),
]

START_S = 300
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_API_KEY": "sesame-4711",
}
OPTIONS = {
    "--host": "127.0.0.1",
    "--served-model-name": "calculator",
    "--dtype": "float32",
    "--max-model-len": "512",
    "--kv-cache-memory-bytes": str(64 << 20),
    "--max-num-batched-tokens": "2048",
    "--distributed-executor-backend": "uni",
    "--logprobs-mode": "processed_logprobs",
    "--generation-config": "vllm",
}
SWITCHES = ("--enforce-eager", "--no-enable-chunked-prefill", "--enable-prompt-tokens-details")


def is_up(port):
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def model_path():
    """The model of the calculator demo."""
    from turnwise_calculator_demo import model_dir

    return model_dir()


@pytest.fixture(scope="module")
def url(model_path, tmp_path_factory):
    """Address of a server that runs for all tests of this file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_path)]
    command += [*(word for option in OPTIONS.items() for word in option), *SWITCHES, "--port", str(port)]
    log = tmp_path_factory.mktemp("vllm") / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, env=os.environ | SETTINGS, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + START_S
        while not is_up(port):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
def serve(url, monkeypatch):
    """A function that runs `scenario(engine)` on the server."""
    monkeypatch.setenv("SERVER_KEY", SETTINGS["VLLM_API_KEY"])

    def run(scenario, **options):
        config = OpenAIConfig(**{"urls": url, "max_context": 512, "api_key_env": "SERVER_KEY", **options})

        async def main():
            engine = OpenAIEngine(config, Resources())
            await engine.start()
            try:
                async with asyncio.timeout(120):
                    return await scenario(engine)
            finally:
                await engine.stop()

        return asyncio.run(main())

    return run


def request(number, **sampling):
    params = SamplingParams(**{"max_tokens": 24, **sampling})
    context = np.random.default_rng(number).integers(3, 360, 8 + number)
    return GenerateRequest(request_id=f"r{number}", trajectory_id=f"t{number}", token_ids=context, sampling=params)


async def together(engine, requests):
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.generate(each)) for each in requests]
    return [task.result() for task in tasks]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_ids_and_logprobs_are_those_of_the_model(serve, model_path, temperature):
    """Of 16 requests at once, to 5e-5 nats of a float32 forward pass."""
    import torch
    import transformers

    requests = [request(i, temperature=temperature) for i in range(16)]
    results = serve(lambda engine: together(engine, requests))

    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    worst = 0.0
    for asked, result in zip(requests, results, strict=True):
        ids = torch.tensor(np.concatenate([asked.token_ids, result.token_ids]).astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(asked.token_ids) - 1 : -1].double() / temperature
        expected = logits.log_softmax(-1).gather(-1, ids[len(asked.token_ids) :, None])[:, 0].numpy()
        worst = max(worst, float(np.abs(expected - result.logprobs).max()))
        assert (24, FinishReason.LENGTH) == (len(result.token_ids), result.finish_reason)
    print(f"largest difference of {16 * 24} log-probabilities at temperature {temperature}: {worst:.2g}")
    assert worst < 5e-5


def test_seeds_stops_and_aborts(serve):
    """What the conformance suite asks of the protocol, of the real server."""

    async def scenario(engine):
        free = await engine.generate(request(1, temperature=0.0))
        stop = int(free.token_ids[10])
        stopped = await engine.generate(request(1, temperature=0.0, stop_token_ids=(stop,)))
        seeded = [await engine.generate(request(2, seed=5)) for _ in range(2)]
        async with asyncio.TaskGroup() as group:
            task = group.create_task(engine.generate(request(3, max_tokens=400)))
            await asyncio.sleep(0.3)
            await engine.abort("r3")
        return free, stop, stopped, seeded, task.result()

    free, stop, stopped, seeded, aborted = serve(scenario)

    end = free.token_ids.tolist().index(stop) + 1
    assert free.token_ids[:end].tolist() == stopped.token_ids.tolist()
    assert (FinishReason.STOP, stop) == (stopped.finish_reason, stopped.stop_reason)
    assert seeded[0].token_ids.tolist() == seeded[1].token_ids.tolist()
    assert FinishReason.ABORT == aborted.finish_reason
    assert 0 < len(aborted.token_ids) == len(aborted.logprobs) < 400


def test_a_wrong_key_and_a_long_context_say_so(serve, monkeypatch):
    """In one line, by the server's own word."""
    monkeypatch.setenv("WRONG_KEY", "wrong")
    long = GenerateRequest(request_id="l", trajectory_id="l", token_ids=[5] * 600, sampling=SamplingParams())

    async def too_long(engine):
        with pytest.raises(EngineError, match="answered 400: ") as caught:
            await engine.generate(long)
        return str(caught.value)

    assert "\n" not in serve(too_long, max_context=None)
    with pytest.raises(EngineError, match="answered 401: it wants a key"):
        serve(too_long, api_key_env="WRONG_KEY")
