"""A real vLLM server on loopback, if vLLM is installed."""

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
from turnwise.types import FinishReason
from turnwise_openai_engine.config import OpenAIConfig
from turnwise_openai_engine.engine import OpenAIEngine
from turnwise_testing.engines.scenarios import forward_logprobs, generate_together, run_scenario, simple_request

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
    """The address of a server for all tests of this file."""
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
    """A function that runs `scenario(engine)` on a started engine for the server."""
    monkeypatch.setenv("SERVER_KEY", SETTINGS["VLLM_API_KEY"])

    def run(scenario, **options):
        config = OpenAIConfig(**{"urls": url, "max_context": 512, "api_key_env": "SERVER_KEY", **options})

        return run_scenario(OpenAIEngine(config, Resources()), scenario, timeout_s=120)

    return run


def request(number, **sampling):
    context = np.random.default_rng(number).integers(3, 360, 8 + number)
    return simple_request(f"r{number}", context, f"t{number}", **{"max_tokens": 24, **sampling})


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_forward_pass(serve, model_path, temperature):
    """For 16 concurrent requests they differ by less than 5e-5 nats, float32 against float32."""
    import torch
    import transformers

    requests = [request(i, temperature=temperature) for i in range(16)]
    results = serve(lambda engine: generate_together(engine, requests))

    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    worst = 0.0
    for each, result in zip(requests, results, strict=True):
        worst = max(worst, float(np.abs(forward_logprobs(model, each, result.token_ids) - result.logprobs).max()))
        assert (24, FinishReason.LENGTH) == (len(result.token_ids), result.finish_reason)
    print(f"largest difference of {16 * 24} log-probabilities at temperature {temperature}: {worst:.2g}")
    assert worst < 5e-5


def test_seeds_stops_and_aborts(serve):
    """Stop ids, seeds and aborts work with the real server."""

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


def test_errors_of_the_server(serve, monkeypatch):
    """A wrong key and a long context give one-line errors."""
    monkeypatch.setenv("WRONG_KEY", "wrong")
    long = simple_request("l", [5] * 600, max_tokens=None)

    async def too_long(engine):
        with pytest.raises(EngineError, match="returned status 400: ") as caught:
            await engine.generate(long)
        return str(caught.value)

    assert "\n" not in serve(too_long, max_context=None)
    with pytest.raises(EngineError, match="returned status 401: it needs a key"):
        serve(too_long, api_key_env="WRONG_KEY")
