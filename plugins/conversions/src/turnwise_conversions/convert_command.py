"""`turnwise convert`: write the episodes of a run, or conversations, in another format."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

FORMATS: Final = ("atif", "openai", "datasets", "sft")
_EXAMPLES: Final = """\
Examples:
  turnwise convert runs/first --to atif --out first.atif.jsonl
  turnwise convert runs/first --to openai --out tune.jsonl --min-reward 1 --tools tools.json
  turnwise convert runs/first --to datasets --out first_dataset
  turnwise convert tune.jsonl --to sft --model models/qwen3 --out sft.parquet
  turnwise convert tune.jsonl --to sft --config run.yaml --out sft.parquet
  turnwise convert runs/first --to sft --min-reward 1 --out sft.parquet"""


class ConvertCommand:
    """Write episodes as ATIF, OpenAI fine-tuning lines or a Hugging Face dataset, or conversations as tokens."""

    help = "write episodes as ATIF, OpenAI fine-tuning lines or a dataset, or conversations as tokens for SFT"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = _EXAMPLES
        parser.add_argument(
            "source", type=Path, help="folder or file of a run; for sft a file of conversations, or the folder of a run"
        )
        parser.add_argument("--to", choices=FORMATS, required=True, help="format")
        parser.add_argument("--out", type=Path, required=True, help="file or, for datasets, folder; must not exist")
        parser.add_argument("--min-reward", type=float, help="leave out episodes with a lower reward, or without one")
        parser.add_argument("--tools", type=Path, help="JSON file with a list of tool schemas (openai, sft)")
        parser.add_argument(
            "--model", help="atif: name of the model; sft of conversations: folder, id on the hub, or .gguf file"
        )
        parser.add_argument(
            "--config",
            nargs="+",
            metavar=("FILE", "a.b=c"),
            help="sft: config of a run, perhaps with changed values, whose model, chat, parser and tools are used",
        )
        parser.add_argument("--revision", help="sft: branch, tag or commit of a model on the hub (default: its main)")

    def run(self, arguments: argparse.Namespace) -> int:
        from turnwise_conversions.conversion import convert

        return convert(arguments)
