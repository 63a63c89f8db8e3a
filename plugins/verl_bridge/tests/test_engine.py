"""The facade over verl's servers, and runs on it; these tests do not need verl."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest
from scripted_servers import EXAMPLE

from turnwise.errors import ConfigError, EngineError
from turnwise.protocols import ModelSpec
from turnwise.types import FinishReason, GenerateRequest, SamplingParams
from turnwise_verl_bridge.config import VerlEngineConfig
from turnwise_verl_bridge.engine import VerlEngine, current_client, parse_output, use_client
from turnwise_verl_bridge.rows import count_turns
from turnwise_verl_bridge.runs import Sampling, build_task, get_manager, load_run_config, stop_all


class Section(dict):
    """A mapping with attribute access, like OmegaConf's."""

    __getattr__ = dict.__getitem__


def verl_config(**rollout):
    """Return the part of verl's config that the bridge uses."""
    sizes = {"prompt_length": 128, "response_length": 192, "n": 2, "temperature": 1.0, "top_p": 1.0, "top_k": -1}
    values = Section(temperature=0, top_p=1.0, top_k=-1, n=1)
    chosen = Section(**{**sizes, "calculate_log_probs": True, "val_kwargs": values, **rollout})
    return Section(
        turnwise=Section(config=str(EXAMPLE)),
        actor_rollout_ref=Section(rollout=chosen, model=Section(path="unused")),
    )


@pytest.fixture(autouse=True)
def stop_managers():
    """Stop all managers after each test."""
    yield
    stop_all()


def make_request(**changes):
    """Return a generate request."""
    fields = {"request_id": "r", "trajectory_id": "t/1", "token_ids": np.asarray([5, 6], np.int32)}
    return GenerateRequest(**{**fields, "sampling": SamplingParams(max_tokens=40, stop_token_ids=(2,)), **changes})


def make_output(ids, **changes):
    """Return an output of verl's servers."""
    fields = {"token_ids": ids, "log_probs": [-0.5] * len(ids), "stop_reason": "completed", "extra_fields": {}}
    return SimpleNamespace(**{**fields, **changes})


@pytest.mark.parametrize(
    ("output", "max_tokens", "reason", "stop"),
    [
        (make_output([8, 2]), 40, FinishReason.STOP, 2),
        (make_output([8, 9]), 2, FinishReason.LENGTH, None),
        (make_output([8, 2]), 2, FinishReason.STOP, 2),
        (make_output([8], stop_reason="aborted"), 40, FinishReason.ABORT, None),
        (make_output([], log_probs=None, stop_reason="aborted"), 40, FinishReason.ABORT, None),
    ],
)
def test_finish_reasons(output, max_tokens, reason, stop):
    """The last token distinguishes a stop from the length limit; verl reports `completed` for both."""
    result = parse_output(output, SamplingParams(max_tokens=max_tokens, stop_token_ids=(2,)))
    assert (result.finish_reason, result.stop_reason) == (reason, stop)
    assert result.token_ids.tolist() == output.token_ids


def test_versions_are_verl_s_steps():
    """The weight version of a result is verl's global step."""
    assert parse_output(make_output([8], extra_fields={"global_steps": 12}), SamplingParams()).weight_version == 12


def test_missing_log_probabilities_are_an_error():
    """The error names the setting in verl's config."""
    with pytest.raises(EngineError, match="calculate_log_probs"):
        parse_output(make_output([8], log_probs=None), SamplingParams())


def test_a_request_uses_verl_s_parameters(servers):
    """The session is the episode's id, and the stop ids and the token limit reach verl."""
    engine = VerlEngine(VerlEngineConfig(max_context=300), servers)
    text = "<|im_start|>user\n2+3<|im_end|>\n<|im_start|>assistant\n"
    prompt = np.asarray(servers.chat.tokenizer.encode(text), np.int32)
    result = asyncio.run(engine.generate(make_request(token_ids=prompt)))
    ((session, ids, params),) = servers.requests
    assert (session, ids, params["max_tokens"], params["stop_token_ids"]) == ("t", prompt.tolist(), 40, [2])
    assert result.finish_reason is FinishReason.STOP
    assert engine.stats() == {"num_running": 0}


@pytest.mark.parametrize("ids", [np.empty(0, np.int32), np.arange(10, dtype=np.int32)])
def test_an_empty_or_too_long_context_is_rejected(servers, ids):
    """The engine rejects the context before it reaches verl."""
    with pytest.raises(EngineError, match=r"empty context|max_context is 10"):
        asyncio.run(VerlEngine(VerlEngineConfig(max_context=10), servers).generate(make_request(token_ids=ids)))


def test_verl_controls_its_servers(servers):
    """Sleep, wake-up and weight updates are rejected, and a stopped engine rejects requests."""
    engine = VerlEngine(VerlEngineConfig(), servers)
    assert (engine.capabilities.abort, engine.capabilities.weight_updates) == (False, False)
    for call in (engine.sleep(1), engine.wake_up(), engine.update_weights([], 1)):
        with pytest.raises(EngineError, match="verl controls its servers"):
            asyncio.run(call)
    asyncio.run(engine.stop())
    with pytest.raises(EngineError, match="stopped"):
        asyncio.run(engine.generate(make_request()))


def test_outside_verl_there_are_no_servers():
    """Outside verl the factory raises a one-line error; inside it finds the client."""
    with pytest.raises(ConfigError, match="only inside verl"):
        current_client()
    with use_client("client"):
        assert current_client() == "client"


def test_verl_s_config_sets_lengths_and_sampling():
    """verl's config sets lengths and sampling; the run's config sets everything else."""
    config = load_run_config(verl_config(), Sampling.from_verl({"temperature": 0.7, "top_p": 0.9, "top_k": 20}))
    rollout = config.rollout
    assert (rollout.prompt_length, rollout.response_length, rollout.n) == (128, 192, 1)
    assert (rollout.sampling.temperature, rollout.sampling.top_p, rollout.sampling.top_k) == (0.7, 0.9, 20)
    assert config.agent.name == "tool_agent"
    assert Sampling.from_verl({"temperature": 0, "top_p": 0.5, "top_k": 3}) == Sampling(
        temperature=0, top_p=1, top_k=-1
    )


def test_errors_name_the_setting():
    """A missing run config and disabled log-probabilities raise errors that name the setting."""
    with pytest.raises(ConfigError, match=r"turnwise\.config=run\.yaml"):
        get_manager(Section(turnwise=None), None, Sampling(temperature=1, top_p=1, top_k=-1))
    with pytest.raises(ConfigError, match="calculate_log_probs is false"):
        load_run_config(verl_config(calculate_log_probs=False), Sampling(temperature=1, top_p=1, top_k=-1))


def test_a_run_on_verl_s_servers(servers):
    """An episode has two turns with a tool call and a reward; equal sampling parameters share a manager."""
    row = {
        "raw_prompt": [{"role": "user", "content": "Calculate 28 * 82."}],
        "reward_model": {"ground_truth": "2296"},
        "data_source": "calculator",
        "extra_info": {"index": 3},
        "agent_name": "turnwise",
    }
    sampling = Sampling.from_verl(verl_config().actor_rollout_ref.rollout)
    manager = get_manager(verl_config(), servers, sampling)
    (result,) = manager.rollout([build_task(row, "u1")])
    assert (str(result.status), result.reward, result.metrics.num_turns) == ("completed", 1.0, 2)
    assert len({session for session, _ids, _params in servers.requests}) == 1
    assert result.task.extra == {"index": 3}
    assert get_manager(verl_config(), servers, sampling) is manager


def test_a_row_runs_the_agent_that_it_names(servers):
    """Rows of one batch have different agents; a name that is no agent is an error with the known ones."""
    row = {"raw_prompt": [{"role": "user", "content": "Calculate 28 * 82."}], "reward_model": {"ground_truth": "2296"}}
    manager = get_manager(verl_config(), servers, Sampling.from_verl(verl_config().actor_rollout_ref.rollout))
    names = ("turnwise", "single_turn_agent", "tool_agent")

    results = manager.rollout([build_task({**row, "agent_name": name}, name) for name in names])

    assert [2, 1, 2] == [result.metrics.num_turns for result in results]
    assert [4, 2, 4] == [count_turns(result.trajectories[0]) for result in results]


def test_routed_experts(tmp_path):
    """verl's routes of context and output become the column; the last token and an aborted request have none."""
    sizes = {"num_hidden_layers": 2, "num_experts_per_tok": 1, "num_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    given = np.array([[[0], [1]], [[2], [3]], [[1], [1]]])
    outputs = iter([make_output([8, 2], routed_experts=given), make_output([8], routed_experts=None)])

    class Client:
        async def generate(self, **_request):
            return next(outputs)

    config = VerlEngineConfig(enable_return_routed_experts=True)
    engine = VerlEngine(config, Client(), ModelSpec(path=tmp_path))
    assert engine.capabilities.columns == {"routed_experts"}
    found = asyncio.run(engine.generate(make_request())).columns["routed_experts"]
    assert found[:, :, 0].tolist() == [[0, 1], [2, 3], [1, 1], [-1, -1]]
    assert (asyncio.run(engine.generate(make_request())).columns["routed_experts"] == -1).all()
    with pytest.raises(ConfigError, match="enable_rollout_routing_replay needs a mixture of experts"):
        VerlEngine(config, Client(), ModelSpec())


def test_routing_replay_of_verl():
    """verl's own switch turns the engine's option on."""
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1)
    on = load_run_config(verl_config(enable_rollout_routing_replay=True), sampling)
    assert on.engine.options["enable_return_routed_experts"] is True
    assert "enable_return_routed_experts" not in load_run_config(verl_config(), sampling).engine.options
