"""
Evaluates a model on held-out tasks with plain transformers, as an independent reference for turnwise.

Token in, token out: sampled ids are appended unchanged, and only the text of a tool message is encoded.
"""

# ruff: noqa: T201, TID253 - a command that no hook imports

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
"""Limit of assistant turns; an episode at the limit ends without an answer."""

MAX_NEW_TOKENS: Final = 64
"""Limit of tokens per assistant turn; a call has about 25."""

_EXAMPLES: Final = """
examples:
  python -m turnwise_calculator_demo.evaluate
  python -m turnwise_calculator_demo.evaluate --num 1024 --seed 1
  python -m turnwise_calculator_demo.evaluate --temperature 0 --model my_model
"""


@define
class Episode:
    """
    The state of one running conversation.

    Attributes:
        problem: the task.
        ids: prompt, sampled turns and tool messages so far.
        num_calls: well-formed calls of the calculator.
        num_errors: calls that the calculator rejected.
        turns: the text of each assistant turn.
        is_done: whether the last turn had no call or reached the turn limit.
    """

    problem: Problem
    ids: list[int]
    num_calls: int = 0
    num_errors: int = 0
    turns: list[str] = field(factory=list)
    is_done: bool = False

    @property
    def score(self) -> float:
        """Reward of the last assistant turn."""
        return exact_match(self.turns[-1], str(self.problem.answer))


@frozen
class Report:
    """
    Metrics of an evaluation.

    Attributes:
        num_episodes: finished episodes.
        accuracy: mean reward.
        accuracy_by_steps: mean reward of the tasks that need one, two and three calls.
        tool_use: share of the episodes with at least one well-formed call.
        calls_per_episode: mean number of well-formed calls.
        errors_per_episode: mean number of calls that the calculator rejected.
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
        by_steps = "  ".join(f"{steps}: {share:.3f}" for steps, share in self.accuracy_by_steps.items())
        return "\n".join(
            [
                f"episodes            {self.num_episodes}",
                f"accuracy            {self.accuracy:.3f}   by steps  {by_steps}",
                f"tool use            {self.tool_use:.3f}",
                f"calls per episode   {self.calls_per_episode:.2f}   rejected {self.errors_per_episode:.3f}",
                f"tokens per episode  {self.tokens_per_episode:.1f}   longest  {self.longest}",
            ]
        )


class Player:
    """
    Runs a batch of episodes with one model.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer, with this package's chat template.
        temperature: Sampling temperature; 0 is greedy.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, temperature: float) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._encoder = EpisodeEncoder(tokenizer)
        self._temperature = temperature

    def play(self, problems: Sequence[Problem]) -> list[Episode]:
        """Run one episode per problem and return them in order; all unfinished episodes advance by a turn at a time."""
        episodes = [Episode(problem, self._encoder.prompt(problem.question)) for problem in problems]
        for _ in range(MAX_TURNS):
            active = [episode for episode in episodes if not episode.is_done]
            if not active:
                break
            for episode, ids in zip(active, self._sample([episode.ids for episode in active]), strict=True):
                self._advance(episode, ids)
        return episodes

    def _advance(self, episode: Episode, ids: list[int]) -> None:
        """Append a sampled turn and the tool's response to its call, if any."""
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
        """Return the sampled ids of one turn per prompt, with the end-of-turn token and without padding."""
        input_ids, attention_mask = self._pad_left(prompts)
        sampling = {"do_sample": True, "temperature": self._temperature, "top_p": 1.0, "top_k": 0}
        output = self._model.generate(  # type: ignore[operator]  # transformers types it as a Tensor
            input_ids=input_ids,
            attention_mask=attention_mask,
            max_new_tokens=MAX_NEW_TOKENS,
            **(sampling if self._temperature > 0 else {"do_sample": False}),
        )
        return [self._cut_at_end(row) for row in output[:, input_ids.shape[1] :].tolist()]

    def _pad_left(self, prompts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """Return (B, T) ids and attention mask."""
        length = max(map(len, prompts))
        pad_id = self._tokenizer.pad_token_id
        ids = [[pad_id] * (length - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return torch.tensor(ids), torch.tensor(mask)

    def _cut_at_end(self, ids: list[int]) -> list[int]:
        """Return the ids up to and including the first end-of-turn token."""
        end = self._tokenizer.eos_token_id
        return ids[: ids.index(end) + 1] if end in ids else ids


def evaluate(
    model: Path | None = None, *, num: int = 256, temperature: float = 1.0, seed: int = 0, split: Split = "test"
) -> Report:
    """
    Evaluate a model on held-out tasks.

    Args:
        model: The model's folder; None uses the shipped model.
        num: Number of episodes.
        temperature: Sampling temperature; 0 is greedy.
        seed: Seed of the tasks and of the sampling.
        split: Split of the tasks.
    """
    folder = model or model_dir()
    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    player = Player(network, PreTrainedTokenizerFast.from_pretrained(folder), temperature)
    return summarize(player.play(list(islice(generate_problems(split, seed), num))))


def summarize(episodes: Sequence[Episode]) -> Report:
    """Return the metrics of at least one finished episode."""
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


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m turnwise_calculator_demo.evaluate",
        description="Evaluate a model on held-out calculator tasks and print the metrics.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="the model's folder (default: the shipped model)")
    parser.add_argument("--num", type=int, default=256, help="number of episodes (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of tasks and sampling (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; None uses `sys.argv`."""
    options = _build_parser().parse_args(arguments)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
    torch.set_num_threads(options.threads)
    started = time.perf_counter()
    report = evaluate(options.model, num=options.num, temperature=options.temperature, seed=options.seed)
    print(report)
    print(f"seconds             {time.perf_counter() - started:.1f}")


if __name__ == "__main__":
    main()
