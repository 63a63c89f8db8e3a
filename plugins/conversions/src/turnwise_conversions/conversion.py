"""Converts the episodes or the conversations of a file."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from turnwise import Chat, EpisodeResult, Message, Task, build_resources
from turnwise.config.resolve import build_part, load_resolved
from turnwise.console import Console
from turnwise.errors import ConfigError, DataError, TemplateError
from turnwise.files import atomic_write, make_parents, partial_path, replace
from turnwise.media import MediaTokens
from turnwise.models.finding import find_model
from turnwise.models.location import ModelSource
from turnwise.protocols import ModelSpec
from turnwise.protocols.agent import PromptingAgent
from turnwise.protocols.command import OK
from turnwise.terminal import write_error
from turnwise.types import TokenArray, ToolSchema
from turnwise_chat_templates import load_chat
from turnwise_conversions.atif import to_atif
from turnwise_conversions.demonstrations import Demonstration, encode_demonstration
from turnwise_conversions.hf_dataset import to_dataset
from turnwise_conversions.openai_chat import to_chat
from turnwise_conversions.sft_file import rows_of_records, write_rows
from turnwise_result_files import read_results
from turnwise_result_files.media import MediaFolder
from turnwise_result_files.messages import is_malformed, shows_picture
from turnwise_strict_json import load_json
from turnwise_task_files import Conversation, check_tools, read_conversations


def convert(arguments: argparse.Namespace) -> int:
    """Convert a file, and return the exit code."""
    out: Path = arguments.out
    if not arguments.source.exists():
        raise ConfigError(f"{arguments.source}: does not exist")
    _check_options(arguments)
    tools = _read_tools(arguments.tools)
    with _writing_to(out):
        if out.exists() or out.is_symlink():
            raise ConfigError(f"{out}: exists already; give another --out")
        make_parents(out)  # fails before the source is read if the folder cannot be written
    num_written, num_read = _convert(arguments, tools)
    write_error(f"{out}: {num_written} of {num_read} written as {arguments.to}\n")
    return OK


@contextmanager
def _writing_to(out: Path) -> Iterator[None]:
    """Raise `ConfigError` for an error of the disk. The source is read before, because its errors name it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror or error}") from error


def _check_options(arguments: argparse.Namespace) -> None:
    if arguments.config and arguments.to != "sft":
        raise ConfigError(f"--config is for sft, not for {arguments.to}")
    if arguments.to == "sft":
        (_check_options_of_records if arguments.source.is_dir() else _check_options_of_conversations)(arguments)
    if arguments.tools is not None and arguments.to not in ("openai", "sft"):
        raise ConfigError(f"--tools is for openai and sft, not for {arguments.to}")
    if arguments.revision is not None and (arguments.to != "sft" or arguments.config):
        raise ConfigError("--revision is for sft with --model")
    if arguments.model and arguments.to in ("openai", "datasets"):
        raise ConfigError(f"--model is for atif and sft, not for {arguments.to}")


def _check_options_of_conversations(arguments: argparse.Namespace) -> None:
    if bool(arguments.model) == bool(arguments.config):
        raise ConfigError("--to sft needs --model, a model with a chat template, or --config, a run with one")
    if arguments.min_reward is not None:
        raise ConfigError("--min-reward is for episodes; conversations have no reward")


def _check_options_of_records(arguments: argparse.Namespace) -> None:
    for name in ("model", "config", "tools", "revision"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name} is for conversations; {arguments.source} is a run, whose records have tokens")


@frozen
class _Writing:
    """
    The parts that write conversations as token ids.

    Attributes:
        chat: of a run, or of a model.
        given: tools of `--tools`, for conversations that do not say; None for the tools of the run.
        run_tools: of the run.
        agent: of the run, if its first prompt depends on the task alone.
    """

    chat: Chat
    given: Sequence[ToolSchema] | None
    run_tools: Sequence[ToolSchema] = ()
    agent: PromptingAgent | None = None

    def encode(self, conversation: Conversation) -> Demonstration:
        """Return a conversation as a rollout would record it."""
        agent, tools = self.agent, self.given if conversation.tools is None else conversation.tools
        column = {} if tools is None else {"tools": list(tools)}

        def write_prompt(messages: Sequence[Message]) -> TokenArray | MediaTokens:
            assert agent is not None, "it is used with an agent alone"
            return agent.first_prompt(Task(messages=tuple(messages), uid=conversation.where, extra=column))

        shown = self.run_tools if tools is None else tools
        return encode_demonstration(self.chat, conversation.messages, shown, None if agent is None else write_prompt)


def _find_writing(arguments: argparse.Namespace, tools: Sequence[ToolSchema]) -> _Writing:
    """Return the parts of a run or of a model; `tools` replace the run's."""
    if not arguments.config:
        source = ModelSource(path=arguments.model, base_dir=Path.cwd(), revision=arguments.revision, key="--model")
        return _Writing(load_chat(ModelSpec(path=find_model(source, weights=False).folder)), tools or None)
    path, *overrides = arguments.config
    config, host = load_resolved(path, overrides)
    resources = build_resources(config, host)
    if resources.chat is None:
        raise ConfigError(f"--config {path}: the run has no model with a chat template")
    agent = build_part(host, "agents", config.agent, resources)
    prompting = agent if isinstance(agent, PromptingAgent) else None
    return _Writing(resources.chat, tools or None, resources.tool_schemas, prompting)


def _choose(results: Sequence[EpisodeResult], min_reward: float | None) -> tuple[list[EpisodeResult], int]:
    """Return the episodes that fit in the order in which they were asked for, and the number of all."""
    ordered = sorted(results, key=lambda r: (r.task.sample_index, r.task.uid, r.rollout_n))
    chosen = [r for r in ordered if min_reward is None or (r.reward is not None and r.reward >= min_reward)]
    return chosen, len(ordered)


def _convert(arguments: argparse.Namespace, tools: Sequence[ToolSchema]) -> tuple[int, int]:
    """Write the file or the folder; return how many were written and read."""
    if arguments.to == "sft" and not arguments.source.is_dir():
        writing = _find_writing(arguments, tools)
        with _writing_to(arguments.out):
            return _write_sft(arguments.source, arguments.out, writing)
    chosen, num_read = _choose(read_results(arguments.source), arguments.min_reward)
    with _writing_to(arguments.out):
        return _write_episodes(chosen, arguments, tools), num_read


def _write_episodes(
    results: Sequence[EpisodeResult], arguments: argparse.Namespace, tools: Sequence[ToolSchema]
) -> int:
    if arguments.to == "sft":
        return _write_records(results, arguments)
    if arguments.to == "datasets":
        _save_dataset(to_dataset(results), arguments.out)
        return len(results)
    if arguments.to == "atif":
        media = MediaFolder(arguments.out.parent)
        documents = (to_atif(each, model=arguments.model or "", media=media) for each in results)
        return _write_lines(arguments.out, documents)
    lines = (to_chat(each, tools) for each in results)
    return _write_lines(arguments.out, (line for line in lines if line is not None))


def _write_records(results: Sequence[EpisodeResult], arguments: argparse.Namespace) -> int:
    illustrated = any(record.pictures for each in results for record in each.trajectories)
    empty = f"{arguments.source}: no episode has a token to learn, with the reward that --min-reward asks for"
    num_written, _num_read = write_rows(
        arguments.out, map(rows_of_records, results), illustrated=illustrated, empty=empty
    )
    return num_written


def _save_dataset(made: Any, folder: Path) -> None:
    """Save a dataset to a folder that gets its name when all is there."""
    partial = partial_path(folder)
    try:
        made.save_to_disk(str(partial))
        replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_lines(path: Path, lines: Iterable[Mapping[str, object]]) -> int:
    """Write JSON lines; the file gets its name when all are there."""
    number = 0
    with atomic_write(path) as partial, partial.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
            number += 1
    return number


def _write_sft(source: Path, out: Path, writing: _Writing) -> tuple[int, int]:
    # Files of texts have no column of pictures, and a file is written in one pass.
    illustrated = any(shows_picture(message) for each in read_conversations(source) for message in each.messages)
    made = (() if each is None else (each,) for each in _demonstrations(source, writing))
    with _progress() as advance:
        return write_rows(
            out,
            made,
            illustrated=illustrated,
            empty=f"{source}: no conversation has a turn to learn: the turns of the assistant have weight 0",
            advance=advance,
        )


def _demonstrations(source: Path, writing: _Writing) -> Iterator[Demonstration | None]:
    """Yield the tokens of each conversation; None for one that no template can show."""
    for each in read_conversations(source):
        # The format `openai` writes episodes with such turns of a model, and gives them no weight.
        if any(message.get("weight") == 0 and is_malformed(message) for message in each.messages):
            yield None
            continue
        try:
            yield writing.encode(each)
        except (DataError, TemplateError) as error:
            raise DataError(f"{each.where}: {error}") from error


@contextmanager
def _progress() -> Iterator[Callable[[int], None]]:
    """Show on a terminal how many conversations are done; a log gets no bar."""
    columns = (TextColumn("{task.completed} conversations"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=None)
        yield lambda number: bar.advance(task, number)


def _read_tools(path: Path | None) -> Sequence[ToolSchema]:
    if path is None:
        return ()
    try:
        value = load_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tools {path}: cannot be read: {error}") from error
    try:
        return check_tools(value, f"--tools {path}")
    except DataError as error:
        raise ConfigError(str(error)) from error
