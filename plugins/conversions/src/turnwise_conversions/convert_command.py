"""`turnwise convert`: write the episodes of a run, or conversations, in another format."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from turnwise import Chat, EpisodeResult, load_chat
from turnwise.errors import ConfigError, DataError
from turnwise.files import partial_path, replace
from turnwise.models.finding import find_model
from turnwise.models.location import ModelSource
from turnwise.protocols import ModelSpec
from turnwise.protocols.command import OK
from turnwise.terminal import write_error
from turnwise.types import ToolSchema
from turnwise_conversions.atif import to_atif
from turnwise_conversions.demonstrations import encode_demonstration
from turnwise_conversions.hf_dataset import to_dataset
from turnwise_conversions.openai_chat import to_chat
from turnwise_result_files import read_results
from turnwise_strict_json import MalformedError, load_json

FORMATS: Final = ("atif", "openai", "datasets", "sft")
_EXAMPLES: Final = """\
Examples:
  turnwise convert runs/first --to atif --out first.atif.jsonl
  turnwise convert runs/first --to openai --out tune.jsonl --min-reward 1 --tools tools.json
  turnwise convert runs/first --to datasets --out first_dataset
  turnwise convert tune.jsonl --to sft --model models/qwen3 --out sft.parquet"""
_SFT_SCHEMA: Final = pa.schema(
    [("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.uint8())), ("labels", pa.list_(pa.int32()))]
)
_IGNORED_LABEL: Final = -100
"""The label that the loss functions of PyTorch and transformers leave out."""


class ConvertCommand:
    """Write episodes as ATIF, OpenAI fine-tuning lines or a Hugging Face dataset, or conversations as tokens."""

    help = "write episodes as ATIF, OpenAI fine-tuning lines or a dataset, or conversations as tokens for SFT"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = _EXAMPLES
        parser.add_argument("source", type=Path, help="folder or file of a run; for sft a JSONL file of conversations")
        parser.add_argument("--to", choices=FORMATS, required=True, help="format")
        parser.add_argument("--out", type=Path, required=True, help="file or, for datasets, folder; must not exist")
        parser.add_argument("--min-reward", type=float, help="leave out episodes with a lower reward, or without one")
        parser.add_argument("--tools", type=Path, help="JSON file with a list of tool schemas (openai, sft)")
        parser.add_argument("--model", help="atif: name of the model; sft: folder, id on the hub, or .gguf file")
        parser.add_argument("--revision", help="sft: branch, tag or commit of a model on the hub (default: its main)")

    def run(self, arguments: argparse.Namespace) -> int:
        out: Path = arguments.out
        _check_options(arguments)
        tools = _read_tools(arguments.tools)
        try:
            if out.exists() or out.is_symlink():
                raise ConfigError(f"{out}: exists already; give another --out")
            out.parent.mkdir(parents=True, exist_ok=True)
            num_written, num_read = _convert(arguments, tools)
        except OSError as error:
            raise ConfigError(f"--out {out}: {error.strerror or error}") from error
        write_error(f"{out}: {num_written} of {num_read} written as {arguments.to}\n")
        return OK


def _check_options(arguments: argparse.Namespace) -> None:
    if arguments.to == "sft" and not arguments.model:
        raise ConfigError("--to sft needs --model, a model with a chat template")
    if arguments.to == "sft" and arguments.min_reward is not None:
        raise ConfigError("--min-reward is for episodes; conversations have no reward")
    if arguments.tools is not None and arguments.to not in ("openai", "sft"):
        raise ConfigError(f"--tools is for openai and sft, not for {arguments.to}")
    if arguments.revision is not None and arguments.to != "sft":
        raise ConfigError(f"--revision is for sft, not for {arguments.to}")
    if arguments.model and arguments.to in ("openai", "datasets"):
        raise ConfigError(f"--model is for atif and sft, not for {arguments.to}")


def _chat_of(model: str, revision: str | None) -> Chat:
    source = ModelSource(path=model, base_dir=Path.cwd(), revision=revision, key="--model")
    return load_chat(ModelSpec(path=find_model(source, weights=False).folder))


def _choose(results: Sequence[EpisodeResult], min_reward: float | None) -> tuple[list[EpisodeResult], int]:
    """Return the episodes that fit in the order in which they were asked for, and the number of all."""
    ordered = sorted(results, key=lambda r: (r.task.sample_index, r.task.uid, r.rollout_n))
    chosen = [r for r in ordered if min_reward is None or (r.reward is not None and r.reward >= min_reward)]
    return chosen, len(ordered)


def _convert(arguments: argparse.Namespace, tools: Sequence[ToolSchema]) -> tuple[int, int]:
    """Write the file or the folder; return how many were written and read."""
    if arguments.to == "sft":
        return _write_sft(arguments.source, arguments.out, _chat_of(arguments.model, arguments.revision), tools)
    chosen, num_read = _choose(read_results(arguments.source), arguments.min_reward)
    return _write_episodes(chosen, arguments, tools), num_read


def _write_episodes(
    results: Sequence[EpisodeResult], arguments: argparse.Namespace, tools: Sequence[ToolSchema]
) -> int:
    if arguments.to == "datasets":
        made = to_dataset(results)
        made.save_to_disk(str(arguments.out))
        return len(results)
    if arguments.to == "atif":
        return _write_lines(arguments.out, (to_atif(each, model=arguments.model or "") for each in results))
    lines = (to_chat(each, tools) for each in results)
    return _write_lines(arguments.out, (line for line in lines if line is not None))


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> int:
    """Write JSON lines; the file gets its name when all are there."""
    partial, number = partial_path(path), 0
    with partial.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
            number += 1
    replace(partial, path)
    return number


def _write_sft(source: Path, out: Path, chat: Chat, tools: Sequence[ToolSchema]) -> tuple[int, int]:
    rows: list[dict[str, Any]] = []
    for number, line in _read_lines(source):
        try:
            made = encode_demonstration(chat, line["messages"], line.get("tools") or tools)
        except DataError as error:
            raise DataError(f"{source}, line {number}: {error}") from error
        ids, mask = made.input_ids, made.loss_mask
        labels = [int(token) if trained else _IGNORED_LABEL for token, trained in zip(ids, mask, strict=True)]
        rows.append({"input_ids": ids.tolist(), "loss_mask": mask.astype("uint8").tolist(), "labels": labels})
    partial = partial_path(out)
    pq.write_table(pa.Table.from_pylist(rows, schema=_SFT_SCHEMA), partial)
    replace(partial, out)
    return len(rows), len(rows)


def _read_lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the number and the object of each line; `DataError` for one that is no conversation."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # `splitlines` also splits within a text of JSON
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = load_json(line)
        except MalformedError as error:
            raise DataError(f"{path}, line {number}: no JSON: {error}") from error
        messages = value.get("messages") if isinstance(value, Mapping) else None
        if not isinstance(messages, list) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
            raise DataError(f"{path}, line {number}: expected an object with a list 'messages', each with a 'role'")
        yield number, value


def _read_tools(path: Path | None) -> list[ToolSchema]:
    if path is None:
        return []
    try:
        value = load_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tools {path}: cannot be read: {error}") from error
    if not isinstance(value, list) or not all(isinstance(each, Mapping) and "function" in each for each in value):
        raise ConfigError(f"--tools {path}: expected a list of schemas in the OpenAI form")
    return value
