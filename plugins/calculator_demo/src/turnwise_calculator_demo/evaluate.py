"""
Measures a model on held-out tasks with plain transformers: the reference that turnwise itself is checked against.

Token in, token out: the ids that were sampled are appended as they are, and of each tool message only the new text is
encoded.
"""

# ruff: noqa: T201, TID253 - a command; no hook imports it

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Final

import torch
from attrs import define, field, frozen
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from turnwise_calculator_demo import model_dir
from turnwise_calculator_demo.encoding import EpisodeEncoder
from turnwise_calculator_demo.episodes import parse_call, respond
from turnwise_calculator_demo.rewards import exact_match
from turnwise_calculator_demo.tasks import Problem, Split, generate_problems

MAX_TURNS: Final = 6
"""Assistant turns after which an episode ends without an answer."""

MAX_NEW_TOKENS: Final = 64
"""Tokens of one assistant turn; a call takes about 25."""

_EXAMPLES: Final = """
examples:
  python -m turnwise_calculator_demo.evaluate
  python -m turnwise_calculator_demo.evaluate --num 1024 --seed 1
  python -m turnwise_calculator_demo.evaluate --temperature 0 --model my_model
"""


@define
class Episode:
    """
    One conversation while it is played.

    Attributes:
        problem: what is asked.
        ids: everything so far: the prompt, sampled turns and tool messages.
        num_calls: well-formed calls of the calculator.
        num_errors: calls that the calculator refused.
        turns: the text of each assistant turn.
        is_done: whether the last turn held no call, or the turns ran out.
    """

    problem: Problem
    ids: list[int]
    num_calls: int = 0
    num_errors: int = 0
    turns: list[str] = field(factory=list)
    is_done: bool = False

    @property
    def score(self) -> float:
        """The reward of the last assistant turn."""
        return exact_match(self.turns[-1], str(self.problem.answer))


@frozen
class Report:
    """
    What an evaluation measured.

    Attributes:
        num_episodes: episodes played.
        accuracy: mean reward.
        accuracy_by_steps: mean reward of the tasks that take one, two and three calls.
        tool_use: share of the episodes with at least one well-formed call.
        calls_per_episode: mean number of well-formed calls.
        errors_per_episode: mean number of calls that the calculator refused.
        tokens_per_episode: mean length in tokens, prompt included.
        longest: length of the longest episode in tokens.
    """

    num_episodes: int
    accuracy: float
    accuracy_by_steps: dict[int, float]
    tool_use: float
    calls_per_episode: float
    errors_per_episode: float
    tokens_per_episode: float
    longest: int

    def __str__(self) -> str:
        """The figures, one a line."""
        by_steps = "  ".join(f"{steps}: {share:.3f}" for steps, share in self.accuracy_by_steps.items())
        return "\n".join(
            [
                f"episodes            {self.num_episodes}",
                f"accuracy            {self.accuracy:.3f}   by steps  {by_steps}",
                f"tool use            {self.tool_use:.3f}",
                f"calls per episode   {self.calls_per_episode:.2f}   refused  {self.errors_per_episode:.3f}",
                f"tokens per episode  {self.tokens_per_episode:.1f}   longest  {self.longest}",
            ]
        )


class Player:
    """
    Plays many episodes at once with one model.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer, with this package's chat template.
        temperature: Sampling temperature; 0 takes the likeliest token.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, temperature: float) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._encoder = EpisodeEncoder(tokenizer)
        self._temperature = temperature

    def play(self, problems: Sequence[Problem]) -> list[Episode]:
        """
        Plays one episode a problem, a turn of all unfinished ones at a time.

        Args:
            problems: What to ask.

        Returns:
            The finished episodes, in the order of the problems.
        """
        episodes = [Episode(problem, self._encoder.prompt(problem.question)) for problem in problems]
        for _ in range(MAX_TURNS):
            active = [episode for episode in episodes if not episode.is_done]
            if not active:
                break
            for episode, ids in zip(active, self._sample([episode.ids for episode in active]), strict=True):
                self._advance(episode, ids)
        return episodes

    def _advance(self, episode: Episode, ids: list[int]) -> None:
        """Appends a sampled turn and, where it calls the tool, the tool's message."""
        episode.ids += ids
        episode.turns.append(str(self._tokenizer.decode(ids, skip_special_tokens=True)))
        expression = parse_call(episode.turns[-1])
        has_ended_turn = ids[-1] == self._tokenizer.eos_token_id
        episode.is_done = expression is None or not has_ended_turn or len(episode.turns) == MAX_TURNS
        if expression is None:
            return
        response = respond(expression)
        episode.num_calls += 1
        episode.num_errors += response.startswith("Error")
        if not episode.is_done:
            episode.ids += self._encoder.observation(response)

    @torch.inference_mode()
    def _sample(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """One turn for each prompt, the end-of-turn token included, padding removed."""
        input_ids, attention_mask = self._left_padded(prompts)
        sampling = {"do_sample": True, "temperature": self._temperature, "top_p": 1.0, "top_k": 0}
        output = self._model.generate(  # type: ignore[operator]  # transformers types it as a Tensor
            input_ids=input_ids,
            attention_mask=attention_mask,
            max_new_tokens=MAX_NEW_TOKENS,
            **(sampling if self._temperature > 0 else {"do_sample": False}),
        )
        return [self._until_end(row) for row in output[:, input_ids.shape[1] :].tolist()]

    def _left_padded(self, prompts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """Ids and attention mask, both [batch, length]."""
        length = max(map(len, prompts))
        pad_id = self._tokenizer.pad_token_id
        ids = [[pad_id] * (length - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return torch.tensor(ids), torch.tensor(mask)

    def _until_end(self, ids: list[int]) -> list[int]:
        """The ids up to the first end-of-turn token."""
        end = self._tokenizer.eos_token_id
        return ids[: ids.index(end) + 1] if end in ids else ids


def evaluate(
    model: Path | None = None, *, num: int = 256, temperature: float = 1.0, seed: int = 0, split: Split = "test"
) -> Report:
    """
    Plays held-out tasks with a model.

    Args:
        model: The model's folder; None takes the shipped one.
        num: Episodes to play.
        temperature: Sampling temperature; 0 is greedy.
        seed: Seed of the tasks and of the sampling.
        split: Which split the tasks come from.

    Returns:
        The figures.
    """
    folder = model or model_dir()
    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    player = Player(network, PreTrainedTokenizerFast.from_pretrained(folder), temperature)
    return summarize(player.play(list(islice(generate_problems(split, seed), num))))


def summarize(episodes: Sequence[Episode]) -> Report:
    """
    The figures of finished episodes.

    Args:
        episodes: At least one.
    """
    num = len(episodes)
    totals: Counter[int] = Counter(len(episode.problem.steps) for episode in episodes)
    scores: Counter[int] = Counter()
    for episode in episodes:
        scores[len(episode.problem.steps)] += int(episode.score)
    return Report(
        num_episodes=num,
        accuracy=scores.total() / num,
        accuracy_by_steps={steps: scores[steps] / totals[steps] for steps in sorted(totals)},
        tool_use=sum(episode.num_calls > 0 for episode in episodes) / num,
        calls_per_episode=sum(episode.num_calls for episode in episodes) / num,
        errors_per_episode=sum(episode.num_errors for episode in episodes) / num,
        tokens_per_episode=sum(len(episode.ids) for episode in episodes) / num,
        longest=max(len(episode.ids) for episode in episodes),
    )


def _parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m turnwise_calculator_demo.evaluate",
        description="Play held-out calculator tasks with a model and print the figures.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="the model's folder (default: the shipped model)")
    parser.add_argument("--num", type=int, default=256, help="episodes to play (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of tasks and sampling (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """
    Runs the command line.

    Args:
        arguments: The arguments; None takes those of the process.
    """
    options = _parser().parse_args(arguments)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(options.threads)
    started = time.perf_counter()
    report = evaluate(options.model, num=options.num, temperature=options.temperature, seed=options.seed)
    print(report)
    print(f"seconds             {time.perf_counter() - started:.1f}")


if __name__ == "__main__":
    main()
