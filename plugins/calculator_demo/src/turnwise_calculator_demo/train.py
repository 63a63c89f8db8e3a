"""
Trains the demo model from scratch on CPU, in about a quarter of an hour on two idle cores.

Two phases: first demonstrations without slips, from which the model learns to read an expression and to copy numbers,
then demonstrations with slips, from which it learns how often to be wrong. The learning rate falls to zero within the
second phase, so the probabilities it ends with are close to the slip rates.
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
    Recipe,
    batched,
    byte_level_tokenizer,
    padded,
    tiny_qwen3,
    train_command,
)

SHIPPED_SLIPS: Final = SlipRates(digit=0.08, order=0.12, early=0.3, rushed=0.04)
"""The rates of the shipped model: a solver that is right on about 48 % of the tasks."""

TAGS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tags that are tokens but not special, so that decoding without special tokens keeps them."""

_STEP_WEIGHTS: Final = {1: 10, 2: 45, 3: 45}
"""Long problems are the harder ones to read, so they are shown more often than they are asked."""

_VOCAB_SIZE: Final = 384


@frozen
class TrainConfig(FitConfig):
    """
    How to train, beside what every such training has.

    Attributes:
        clean_share: part of the demonstrations, from the first on, that hold no slips.
        without_tools: part of the demonstrations whose prompt does not list the calculator.
        slips: what the second phase imitates.
    """

    clean_share: float = 0.6
    without_tools: float = 0.1
    slips: SlipRates = SHIPPED_SLIPS


_DEFAULTS: Final = TrainConfig(steps=1500)


def recipe(config: TrainConfig) -> Recipe:
    """Build tokenizer, model and batches."""
    template = files("turnwise_calculator_demo").joinpath("chat_template.jinja").read_text(encoding="utf-8")
    tokenizer = byte_level_tokenizer(_corpus(config), _VOCAB_SIZE, tags=TAGS, chat_template=template)
    stream = demonstrations(config, EpisodeEncoder(tokenizer))
    return Recipe(tokenizer, tiny_qwen3(tokenizer), batched(stream, config.batch_size, padded))


def demonstrations(config: TrainConfig, encoder: EpisodeEncoder) -> Iterator[Demonstration]:
    """
    An endless stream of encoded demonstrations for each phase in turn.

    Args:
        config: How to train.
        encoder: The tokenizer's encoder.

    Yields:
        Token ids and, of the same length, whether the assistant wrote the token.
    """
    source = random.Random(config.seed)
    clean, noisy = NoisySolver(CLEAN, source), NoisySolver(config.slips, source)
    num_clean = round(config.steps * config.clean_share) * config.batch_size
    for index, problem in enumerate(generate_problems("train", config.seed, _STEP_WEIGHTS)):
        with_tools = source.random() >= config.without_tools
        yield _encode(problem, clean if index < num_clean else noisy, encoder, with_tools=with_tools)


def _encode(problem: Problem, solver: NoisySolver, encoder: EpisodeEncoder, *, with_tools: bool) -> Demonstration:
    """One demonstration as ids and as the mask of what the assistant wrote."""
    ids = encoder.prompt(problem.question, with_tools=with_tools)
    mask = [False] * len(ids)
    for turn in solver.solve(problem):
        action = encoder.action(turn.text)
        observation = [] if turn.response is None else encoder.observation(turn.response)
        ids += action + observation
        mask += [True] * len(action) + [False] * len(observation)
    return ids, mask


def _corpus(config: TrainConfig) -> Iterator[str]:
    """Questions and demonstrations to learn the merges from."""
    yield f"Tools: {TOOL_NAME}(expression)"
    yield "system\nuser\nassistant\n" * 100
    solver = NoisySolver(config.slips, random.Random(config.seed))
    for problem in islice(generate_problems("train", config.seed), 500):
        yield problem.question
        for turn in solver.solve(problem):
            yield f"assistant\n{turn.text}"
            yield f"user\n{turn.response}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; None takes the arguments of the process."""
    prog = "python -m turnwise_calculator_demo.train"
    train_command(prog, "Train the calculator demo model from scratch on CPU.", _DEFAULTS, recipe, arguments)


if __name__ == "__main__":
    main()
