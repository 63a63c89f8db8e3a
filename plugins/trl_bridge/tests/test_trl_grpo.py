"""TRL's real GRPOTrainer on fake episodes: it trains on the sampled tokens and log-probabilities."""

import numpy as np
import pytest
import torch
from fake_manager import FakeManager, make_result, make_task

from turnwise import Trajectory
from turnwise.batch.rollout_batch import collate
from turnwise.errors import ConfigError
from turnwise_testing.inputs.tokenizers import byte_tokenizer
from turnwise_trl_bridge import Rollouts

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def compute_logprobs(model, trajectory):
    """Return the log-probability of each response token under the record's layout, from one forward pass."""
    batch = collate([make_result(make_task("x"), trajectory)], pad_token_id=0)
    seen = torch.zeros(1, 1, *batch.visibility().shape[1:]).masked_fill(~batch.visibility()[:, None], -1e9)
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids, attention_mask=seen, position_ids=batch.position_ids).logits
    logprobs = logits.float().log_softmax(-1)[0]
    ids, index = batch.input_ids[0], np.arange(len(trajectory))
    before = [max(k for k in index[:q] if batch.visibility()[0, q, k]) for q in index[1:]]
    return logprobs[torch.tensor(before), ids[1:]].numpy()[trajectory.num_prompt_tokens - 1 :]


def make_record(model, number, *, forked):
    """Return a record with the model's log-probabilities, with or without two parallel paths."""
    random = np.random.default_rng(number)

    def ids(count):
        return random.integers(3, 250, count).astype(np.int32)

    pieces = [ids(4 + number % 3) for _ in range(5)]

    def build(logprobs):
        remaining = iter(logprobs)
        next_ones = lambda piece: np.asarray([next(remaining) for _ in piece], np.float32)  # noqa: E731
        record = Trajectory(np.asarray([9] * (2 + number % 4), np.int32))
        record.add_action(pieces[0], next_ones(pieces[0]), 0)
        record.add_observation(pieces[1])
        _ = next_ones(pieces[1])
        if forked:
            paths = record.fork(2)
            for path, piece in zip(paths, pieces[2:4], strict=True):
                path.add_forced(piece[:1])
                _ = next_ones(piece[:1])
                path.add_action(piece[1:], next_ones(piece[1:]), 0)
            record.join(paths)
        record.add_forced(pieces[4][:1])
        _ = next_ones(pieces[4][:1])
        record.add_action(pieces[4][1:], next_ones(pieces[4][1:]), 0)
        return record

    blank = build(np.zeros(1000))
    return build(compute_logprobs(model, blank))


def make_trainer(model, tmp_path, *, forked, kind=None, **options):
    """Return a trainer with four episodes of the model for each of four tasks, and its manager."""
    from gap_trainer import GapTrainer
    from trl import GRPOConfig

    kind = kind or GapTrainer
    tasks = {f"t{n}": make_task(f"t{n}") for n in range(4)}
    records = [make_record(model, number, forked=forked) for number in range(16)]
    rewards = [float(number % 3 == 0) for number in range(16)]
    manager = FakeManager(lambda task, number: make_result(task, records[number], reward=rewards[number]))
    settings = {"per_device_train_batch_size": 16, "num_generations": 4, "max_steps": 2, "report_to": "none"}
    args = GRPOConfig(
        output_dir=str(tmp_path),
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=True,
        learning_rate=0.0,
        **settings,
        **options.pop("args", {}),
    )
    rollouts = Rollouts(manager, tasks)
    return kind(model, rollouts=rollouts, args=args, processing_class=byte_tokenizer(), **options), manager


@pytest.mark.many_cases(2)
@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_trained_and_sampled_log_probabilities_agree(tiny, tmp_path, forked, attention):
    """They agree within float32 rounding, with observations and with parallel paths under their layout."""
    tiny.set_attn_implementation(attention)
    trainer, _manager = make_trainer(tiny, tmp_path, forked=forked)
    trainer.train()
    assert len(trainer.gaps) == 2
    assert max(trainer.gaps) < 1e-5


def test_without_the_layout_they_differ(tiny, tmp_path):
    """The same records as causal rows have a large gap, so the test above can fail."""
    from gap_trainer import GapTrainer

    class Causal(GapTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, {k: v for k, v in inputs.items() if k != "path_start"})

    trainer, _manager = make_trainer(tiny, tmp_path, forked=True, kind=Causal)
    trainer.train()
    assert max(trainer.gaps) > 1e-3


def test_weights_reach_the_engines_before_each_step(tiny, tmp_path):
    """The engines receive every step's weights under the names of the checkpoint."""
    trainer, manager = make_trainer(tiny, tmp_path, forked=False)
    trainer.train()
    assert manager.weight_version == 2
    expected = {name: tensor for name, tensor in tiny.state_dict().items() if name != "lm_head.weight"}
    assert set(manager.weights) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(manager.weights[name], tensor)


def test_advantages_may_differ_between_tokens(tiny, tmp_path):
    """Token advantages replace the advantage of the row; a wrong shape raises."""
    from gap_trainer import GapTrainer

    seen = []

    class AdvantageTrainer(GapTrainer):
        def _compute_loss(self, model, inputs):
            seen.append(inputs["advantages"])
            return super()._compute_loss(model, inputs)

    def ramp(output, advantages):
        width = output["completion_ids"].shape[1]
        return advantages[:, None] * torch.linspace(0, 1, width)[None]

    trainer, _manager = make_trainer(tiny, tmp_path, forked=False, kind=AdvantageTrainer, token_advantages=ramp)
    trainer.train()
    assert [tuple(each.shape) for each in seen] == [(16, each.shape[1]) for each in seen]
    trainer, _manager = make_trainer(tiny, tmp_path, forked=False, token_advantages=lambda _output, row: row)
    with pytest.raises(ConfigError, match="token_advantages returned shape"):
        trainer.train()


def test_a_different_temperature_is_rejected(tiny, tmp_path):
    """The temperatures of TRL and of the run must be equal."""
    with pytest.raises(ConfigError, match=r"temperature is 0\.7"):
        make_trainer(tiny, tmp_path, forked=False, args={"temperature": 0.7})


def test_a_mask_for_other_attention_is_rejected():
    """An attention implementation without 4-D masks raises."""
    from turnwise_trl_bridge.grpo import build_path_mask

    layout = {name: torch.zeros(1, 3, dtype=torch.long) for name in ("block_start", "path_start")}
    with pytest.raises(ConfigError, match="flash_attention_2"):
        build_path_mask(torch.ones(1, 3), layout, "flash_attention_2")
