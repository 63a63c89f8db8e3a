"""`turnwise tags`: writes a model whose tokenizer has each tag of parallel thinking as one token."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from attrs import evolve, fields

from turnwise import NoConfig, Resources
from turnwise.errors import ConfigError
from turnwise.protocols.command import OK
from turnwise.terminal import write_output
from turnwise_parallel_thinking.config import Tags

_NAMES: Final = tuple(each.name for each in fields(Tags) if each.name != "separator")
_EPILOG: Final = f"""\
Examples:
  turnwise tags models/qwen3 --to models/qwen3_tags
  turnwise tags Qwen/Qwen3-0.6B --to models/qwen3_tags --tag block=<fork> --tag end_block=</fork>

The agent parallel_thinking needs each tag as one token. Tags that are more tokens of MODEL are added to its tokenizer,
and their embeddings begin as the mean of these tokens' own. FOLDER is a model for every engine and trainer; the rest of
the vocabulary keeps its ids. Names of tags: {", ".join(_NAMES)}.
Exit codes: 0; 2 for bad input; 1 if it failed.
"""


class TagsCommand:
    """Adds tags to the vocabulary of a model."""

    help = "write a model folder that has each tag of parallel thinking as one token"

    def __init__(self, config: NoConfig, resources: Resources) -> None:
        """Ignore both: all options are on the command line."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = _EPILOG
        parser.add_argument(
            "model",
            metavar="MODEL",
            help="folder of a model, its id on the hub such as Qwen/Qwen3-0.6B, or a .gguf file",
        )
        parser.add_argument("--revision", help="branch, tag or commit of a model on the hub (default: its main branch)")
        parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="folder to write; must be new")
        parser.add_argument(
            "--tag", action="append", default=[], metavar="NAME=TEXT", help="text of a tag in place of Parallel-R1's"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        tags = read_tags(arguments.tag)
        try:
            from turnwise_parallel_thinking.added_tags import add_tags
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"turnwise tags needs {error.name}: pip install 'turnwise-parallel-thinking[train]'"
            ) from error
        from turnwise.models.location import ModelSource

        source = ModelSource(path=arguments.model, base_dir=Path.cwd(), revision=arguments.revision, key="MODEL")
        added = add_tags(source, arguments.to, tags)
        write_output(
            f"wrote {arguments.to}: {', '.join(f'{text} is {token_id}' for text, token_id in added.items())}\n"
        )
        return OK


def read_tags(settings: Sequence[str]) -> Tags:
    """Return the tags with texts from `NAME=TEXT`; `ConfigError` for another name, an empty text or two equal tags."""
    texts: dict[str, str] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in _NAMES or not text.strip():
            raise ConfigError(f"--tag {setting!r}: give NAME=TEXT with a name out of {', '.join(_NAMES)}")
        texts[name] = text
    try:
        return evolve(Tags(), **texts)
    except ValueError as error:
        raise ConfigError(f"--tag: {error}") from error
