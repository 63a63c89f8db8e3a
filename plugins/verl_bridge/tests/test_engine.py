"""The facade over verl's servers, and runs on it; nothing here needs verl."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from given_servers import EXAMPLE

from turnwise.errors import ConfigError, EngineError
from turnwise.types import FinishReason, GenerateRequest, SamplingParams
from turnwise_verl_bridge.config import VerlEngineConfig
from turnwise_verl_bridge.engine import VerlEngine, bound_client, bound_to, result_of
from turnwise_verl_bridge.runs import Sampling, manager_for, run_config, stop_all, task_of


class Section(dict):
    """A mapping whose keys are attributes too, as OmegaConf's."""

    __getattr__ = dict.__getitem__


def verl_config(**rollout):
    """Return the part of verl's config that the bridge reads."""
    sizes = {"prompt_length": 128, "response_length": 192, "n": 2, "temperature": 1.0, "top_p": 1.0, "top_k": -1}
    values = Section(temperature=0, top_p=1.0, top_k=-1, n=1)
    chosen = Section(**{**sizes, "calculate_log_probs": True, "val_kwargs": values, **rollout})
    return Section(
        turnwise=Section(config=str(EXAMPLE)),
        actor_rollout_ref=Section(rollout=chosen, model=Section(path="unused")),
    )


@pytest.fixture(autouse=True)
def stopped():
    """Leave no manager behind."""
    yield
    stop_all()


def ask(**changes):
    """Return a request."""
    fields = {"request_id": "r", "trajectory_id": "t/1", "token_ids": np.asarray([5, 6], np.int32)}
    return GenerateRequest(**{**fields, "sampling": SamplingParams(max_tokens=40, stop_token_ids=(2,)), **changes})


def output(ids, **changes):
    """Return what verl's servers answer."""
    fields = {"token_ids": ids, "log_probs": [-0.5] * len(ids), "stop_reason": "completed", "extra_fields": {}}
    return SimpleNamespace(**{**fields, **changes})


@pytest.mark.parametrize(
    ("answer", "max_tokens", "reason", "stop"),
    [
        (output([8, 2]), 40, FinishReason.STOP, 2),
        (output([8, 9]), 2, FinishReason.LENGTH, None),
        (output([8, 2]), 2, FinishReason.STOP, 2),
        (output([8], stop_reason="aborted"), 40, FinishReason.ABORT, None),
        (output([], log_probs=None, stop_reason="aborted"), 40, FinishReason.ABORT, None),
    ],
)
def test_why_a_turn_ended(answer, max_tokens, reason, stop):
    """verl says `completed` of both; the last token tells a turn that ended from one that was cut."""
    result = result_of(answer, SamplingParams(max_tokens=max_tokens, stop_token_ids=(2,)))
    assert (result.finish_reason, result.stop_reason) == (reason, stop)
    assert result.token_ids.tolist() == answer.token_ids


def test_versions_are_verl_s_steps():
    """An answer carries the step whose weights sampled it."""
    assert result_of(output([8], extra_fields={"global_steps": 12}), SamplingParams()).weight_version == 12


def test_without_log_probabilities_nothing_can_be_trained():
    """The error names the switch in verl's config."""
    with pytest.raises(EngineError, match="calculate_log_probs"):
        result_of(output([8], log_probs=None), SamplingParams())


def test_a_request_is_put_in_verl_s_words(servers):
    """The whole episode is one sticky session; the stop ids and the budget travel."""
    engine = VerlEngine(VerlEngineConfig(max_context=300), servers)
    text = "<|im_start|>user\n2+3<|im_end|>\n<|im_start|>assistant\n"
    prompt = np.asarray(servers.chat.tokenizer.encode(text), np.int32)
    result = asyncio.run(engine.generate(ask(token_ids=prompt)))
    ((session, ids, params),) = servers.asked
    assert (session, ids, params["max_tokens"], params["stop_token_ids"]) == ("t", prompt.tolist(), 40, [2])
    assert result.finish_reason is FinishReason.STOP
    assert engine.stats() == {"num_running": 0}


@pytest.mark.parametrize("ids", [np.empty(0, np.int32), np.arange(10, dtype=np.int32)])
def test_a_context_that_cannot_be_served(servers, ids):
    """It is refused before verl sees it."""
    with pytest.raises(EngineError, match=r"empty context|room for 10"):
        asyncio.run(VerlEngine(VerlEngineConfig(max_context=10), servers).generate(ask(token_ids=ids)))


def test_what_is_verl_s_own_business(servers):
    """Sleep, wake and weights are refused; aborts are not there; a stopped engine serves no more."""
    engine = VerlEngine(VerlEngineConfig(), servers)
    assert (engine.capabilities.abort, engine.capabilities.weight_updates) == (False, False)
    for call in (engine.sleep(1), engine.wake_up(), engine.update_weights([], 1)):
        with pytest.raises(EngineError, match="verl"):
            asyncio.run(call)
    asyncio.run(engine.stop())
    with pytest.raises(EngineError, match="stopped"):
        asyncio.run(engine.generate(ask()))


def test_outside_verl_there_is_no_server():
    """The factory says so in one line; inside, it finds the client."""
    with pytest.raises(ConfigError, match="inside verl only"):
        bound_client()
    with bound_to("client"):
        assert bound_client() == "client"


def test_verl_s_config_decides_lengths_and_sampling():
    """Everything else is the run's."""
    config = run_config(verl_config(), Sampling.of({"temperature": 0.7, "top_p": 0.9, "top_k": 20}))
    rollout = config.rollout
    assert (rollout.prompt_length, rollout.response_length, rollout.n) == (128, 192, 1)
    assert (rollout.sampling.temperature, rollout.sampling.top_p, rollout.sampling.top_k) == (0.7, 0.9, 20)
    assert config.agent.name == "tool_agent"
    assert Sampling.of({"temperature": 0, "top_p": 0.5, "top_k": 3}) == Sampling(temperature=0, top_p=1, top_k=-1)


def test_bad_configs_say_what_to_set():
    """A missing run, and log-probabilities that are off."""
    with pytest.raises(ConfigError, match=r"turnwise\.config=run\.yaml"):
        manager_for(Section(turnwise=None), None, Sampling(temperature=1, top_p=1, top_k=-1))
    with pytest.raises(ConfigError, match="calculate_log_probs=true"):
        run_config(verl_config(calculate_log_probs=False), Sampling(temperature=1, top_p=1, top_k=-1))


def test_a_run_on_verl_s_servers(servers):
    """Two turns with a tool between them, the reward inside the rollout, one manager for each way of sampling."""
    row = {
        "raw_prompt": [{"role": "user", "content": "Calculate 28 * 82."}],
        "reward_model": {"ground_truth": "2296"},
        "data_source": "calculator",
        "extra_info": {"index": 3},
        "agent_name": "turnwise",
    }
    sampling = Sampling.of(verl_config().actor_rollout_ref.rollout)
    manager = manager_for(verl_config(), servers, sampling)
    (result,) = manager.rollout([task_of(row, "u1")])
    assert (str(result.status), result.reward, result.metrics.num_turns) == ("completed", 1.0, 2)
    assert len({session for session, _ids, _params in servers.asked}) == 1
    assert result.task.extra == {"index": 3}
    assert manager_for(verl_config(), servers, sampling) is manager
