"""
The workload of the turn-cost benchmarks: the policy's outputs, the tool's replies and their latencies.

The workload is deterministic, so every trajectory can be compared with the expected one. The engine derives the episode
and the turn from the context alone: the user message has the episode's id, and the number of assistant headers gives
the turn.
"""

from __future__ import annotations

import json
import math
import random
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import field, frozen

from turnwise import Task

VOCABULARY = 16_000
WORDS = ("time", "name", "list", "value", "index", "model", "data", "file", "path", "state", "code", "type", "order")
LOOKUP_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look a key up in a slow external store.",
        "parameters": {
            "type": "object",
            "properties": {
                "key": {"type": "string", "description": "episode:turn"},
                "ms": {"type": "number", "description": "simulated latency in milliseconds"},
                "chars": {"type": "integer", "description": "length of the reply in characters"},
            },
            "required": ["key", "ms", "chars"],
        },
    },
}


def schemas(count: int) -> list[dict[str, Any]]:
    """Return the tool's schema and `count - 1` unused schemas of the same size."""
    others = []
    for index in range(1, count):
        other = json.loads(json.dumps(LOOKUP_SCHEMA))
        other["function"]["name"] = f"lookup_{index}"
        others.append(other)
    return [LOOKUP_SCHEMA, *others]


@frozen
class Turn:
    """A turn of the policy: its number of tokens and the latency of its tool call; a final turn has no call."""

    num_tokens: int
    tool_s: float = 0.0
    final: bool = False


@frozen
class Workload:
    """
    The episodes and the engine's speed.

    Attributes:
        episodes: the turns of each episode.
        seconds_per_token: the engine's latency, independent of its load.
        prompt_words: words of the user message, about 2.2 tokens each.
        reply_chars: length of a tool's reply.
    """

    episodes: tuple[tuple[Turn, ...], ...]
    seconds_per_token: float = 0.0
    prompt_words: int = 215
    reply_chars: int = 200

    @property
    def num_turns(self) -> int:
        """Number of turns in all episodes."""
        return sum(map(len, self.episodes))

    def critical_path_s(self) -> float:
        """Return the seconds of the slowest episode alone: the lower bound of any makespan."""
        return max(
            sum(turn.num_tokens * self.seconds_per_token + turn.tool_s for turn in turns) for turns in self.episodes
        )

    def messages(self, episode: int) -> list[dict[str, str]]:
        """Return the prompt messages of an episode."""
        rng = random.Random(episode)
        body = " ".join(rng.choice(WORDS) for _ in range(self.prompt_words))
        return [
            {"role": "system", "content": "Use the tool when needed, then answer."},
            {"role": "user", "content": f"ID{episode:06d} {body}"},
        ]

    def reply(self, key: str) -> str:
        """Return the tool's reply to a key."""
        rng = random.Random(key)
        words = [f"value of {key} is"]
        while sum(map(len, words)) + len(words) < self.reply_chars:
            words.append(rng.choice(WORDS))
        return " ".join(words)[: self.reply_chars]

    def arguments(self, episode: int, turn: int) -> dict[str, Any]:
        """Return the arguments of the tool call at the end of a turn."""
        tool_ms = round(self.episodes[episode][turn].tool_s * 1e3, 3)
        return {"key": f"{episode}:{turn}", "ms": tool_ms, "chars": self.reply_chars}

    def tasks(self) -> list[Task]:
        """Return a task per episode."""
        return [
            Task(messages=tuple(self.messages(number)), uid=str(number), sample_index=number)
            for number in range(len(self.episodes))
        ]

    def script(self, encode: Callable[[str], list[int]], eos: int) -> list[list[list[int]]]:
        """Return the ids of every turn of every episode."""
        return [list(self._turns(number, turns, encode, eos)) for number, turns in enumerate(self.episodes)]

    def _turns(
        self, number: int, turns: Sequence[Turn], encode: Callable[[str], list[int]], eos: int
    ) -> Iterator[list[int]]:
        for index, turn in enumerate(turns):
            call = json.dumps({"name": "lookup", "arguments": self.arguments(number, index)})
            tail = [eos] if turn.final else [*encode(f"\n<tool_call>\n{call}\n</tool_call>"), eos]
            rng = random.Random(number * 1000 + index)
            yield [rng.randrange(1000, VOCABULARY - 100) for _ in range(max(1, turn.num_tokens - len(tail)))] + tail


def uniform(num_episodes: int, *, turns: int = 4, tokens: int = 200, **options: Any) -> Workload:
    """Return equal episodes of `turns` turns with `tokens` tokens each."""
    one = (*[Turn(tokens)] * (turns - 1), Turn(tokens, final=True))
    return Workload((one,) * num_episodes, **options)


def heavy_tail(
    num_episodes: int, *, median_s: float, sigma: float = 1.2, cap_s: float = 10.0, seed: int = 0, **options: Any
) -> Workload:
    """Return episodes of 4 turns with log-normal tool latencies."""
    rng = random.Random(seed)
    episodes = tuple(
        (
            *[Turn(200, min(cap_s, median_s * math.exp(rng.gauss(0, sigma)))) for _ in range(3)],
            Turn(200, final=True),
        )
        for _ in range(num_episodes)
    )
    return Workload(episodes, **options)


@frozen
class Oracle:
    """
    Derives the policy's next turn from the context alone.

    Attributes:
        script: token ids by episode and turn.
        header: id of ``<|im_start|>``.
        digits: values of the digits by token id.
        logprobs: log-probabilities by number of tokens.
        seconds: processor seconds of all answers so far, in one value: what runs the workload would not have spent them
            with a real engine.
    """

    script: list[list[list[int]]]
    header: int
    digits: dict[int, int]
    logprobs: dict[int, list[float]] = field(factory=dict)
    seconds: list[float] = field(factory=lambda: [0.0])

    @classmethod
    def of(cls, workload: Workload, tokenizer: Any) -> Oracle:
        """Build the oracle of a workload for a tokenizer."""
        digits = {tokenizer.convert_tokens_to_ids(str(digit)): digit for digit in range(10)}
        script = workload.script(lambda text: tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)
        return cls(script, tokenizer.convert_tokens_to_ids("<|im_start|>"), digits)

    def answer(self, ids: Sequence[int] | np.ndarray) -> tuple[list[int], list[float]]:
        """Return the ids and log-probabilities of the turn after a context."""
        started = time.thread_time()
        try:
            return self._find(ids)
        finally:
            self.seconds[0] += time.thread_time() - started

    def _find(self, ids: Sequence[int] | np.ndarray) -> tuple[list[int], list[float]]:
        headers = self._headers(ids)
        turns = self.script[self._episode(ids[headers[1] + 1 : headers[1] + 24])]
        turn = turns[min((len(headers) - 3) // 2, len(turns) - 1)]
        logprobs = self.logprobs.setdefault(len(turn), [-0.5 - 1e-4 * i for i in range(len(turn))])
        return turn, logprobs

    def _headers(self, ids: Sequence[int] | np.ndarray) -> list[int]:
        if isinstance(ids, np.ndarray):
            return np.flatnonzero(ids == self.header).tolist()
        return [index for index, token in enumerate(ids) if token == self.header]

    def _episode(self, ids: Sequence[int] | np.ndarray) -> int:
        digits = [self.digits[int(token)] for token in ids if int(token) in self.digits]
        return int("".join(map(str, digits[:6])))


def load_tokenizer(folder: Path) -> Any:
    """Load a 16,000-token byte-level tokenizer with a ChatML tool template; train it on the standard library once."""
    from transformers import PreTrainedTokenizerFast

    from turnwise_testing.inputs.tokenizers import CHATML

    if not (folder / "tokenizer.json").exists():
        _train(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def _train(folder: Path) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    split = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    files = sorted(map(str, Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    tokenizer.train(files, trainer)
    tags = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
