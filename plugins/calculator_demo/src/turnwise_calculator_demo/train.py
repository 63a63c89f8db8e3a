"""
Trains the demo model from scratch on a CPU, in about a quarter of an hour on two idle cores.

The first phase uses demonstrations without slips: the model learns to read expressions and to copy numbers. The second
phase uses demonstrations with slips: the model learns the error rates. The learning rate decays to zero in the second
phase, so the final probabilities are close to the slip rates.
"""

import random
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import islice
from typing import Final

from attrs import frozen

from turnwise_calculator_demo.demonstrations import CLEAN, NoisySolver, SlipRates
from turnwise_calculator_demo.encoding import EpisodeEncoder
from turnwise_calculator_demo.episodes import TOOL_NAME
from turnwise_calculator_demo.tasks import Problem, generate_problems
from turnwise_tiny_models import (
    Demonstration,
    FitConfig,
    Training,
    batched,
    byte_level_tokenizer,
    pad_demonstrations,
    tiny_qwen3,
    train_command,
)

SHIPPED_SLIPS: Final = SlipRates(digit=0.08, order=0.12, early=0.3, rushed=0.04)
"""Slip rates of the shipped model; a solver with these rates solves about 48 % of the tasks."""

TAGS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens that are not special, so `skip_special_tokens` keeps them."""

_STEP_WEIGHTS: Final = {1: 10, 2: 45, 3: 45}
"""Long problems are harder to read, so they are more frequent here than in the tasks."""

_VOCAB_SIZE: Final = 384


@frozen
class TrainConfig(FitConfig):
    """
    Hyperparameters of the demo's training.

    Attributes:
        clean_share: share of the demonstrations in the first phase, which has no slips.
        without_tools: share of the demonstrations whose prompt does not list the calculator.
        slips: slip rates of the second phase.
    """

    clean_share: float = 0.6
    without_tools: float = 0.1
    slips: SlipRates = SHIPPED_SLIPS


_DEFAULTS: Final = TrainConfig(steps=1500)


def build_training(config: TrainConfig) -> Training:
    """Build tokenizer, model and batches."""
    template = files("turnwise_calculator_demo").joinpath("chat_template.jinja").read_text(encoding="utf-8")
    tokenizer = byte_level_tokenizer(_corpus(config), _VOCAB_SIZE, tags=TAGS, chat_template=template)
    stream = demonstrations(config, EpisodeEncoder(tokenizer))
    return Training(tokenizer, tiny_qwen3(tokenizer), batched(stream, config.batch_size, pad_demonstrations))


def demonstrations(config: TrainConfig, encoder: EpisodeEncoder) -> Iterator[Demonstration]:
    """Yield an endless stream of encoded demonstrations, first without slips and then with slips."""
    source = random.Random(config.seed)
    clean, noisy = NoisySolver(CLEAN, source), NoisySolver(config.slips, source)
    num_clean = round(config.steps * config.clean_share) * config.batch_size
    for index, problem in enumerate(generate_problems("train", config.seed, _STEP_WEIGHTS)):
        with_tools = source.random() >= config.without_tools
        yield encode_demonstration(problem, clean if index < num_clean else noisy, encoder, with_tools=with_tools)


def encode_demonstration(
    problem: Problem, solver: NoisySolver, encoder: EpisodeEncoder, *, with_tools: bool = True
) -> Demonstration:
    """Return the ids of one demonstration and the mask of the assistant's tokens."""
    ids = encoder.prompt(problem.question, with_tools=with_tools)
    mask = [False] * len(ids)
    for turn in solver.solve(problem):
        action = encoder.action(turn.text)
        observation = [] if turn.response is None else encoder.observation(turn.response)
        ids += action + observation
        mask += [True] * len(action) + [False] * len(observation)
    return ids, mask


def _corpus(config: TrainConfig) -> Iterator[str]:
    """Yield the texts that the tokenizer is trained on."""
    yield f"Tools: {TOOL_NAME}(expression)"
    yield "system\nuser\nassistant\n" * 100
    solver = NoisySolver(config.slips, random.Random(config.seed))
    for problem in islice(generate_problems("train", config.seed), 500):
        yield problem.question
        for turn in solver.solve(problem):
            yield f"assistant\n{turn.text}"
            yield f"user\n{turn.response}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; None uses `sys.argv`."""
    prog = "python -m turnwise_calculator_demo.train"
    train_command(prog, "Train the calculator demo model from scratch on a CPU.", _DEFAULTS, build_training, arguments)


if __name__ == "__main__":
    main()
