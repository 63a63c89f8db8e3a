"""The command `turnwise sft ROWS`: fine-tunes a model on demonstrations with TRL's SFTTrainer."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from turnwise import NoConfig, Resources
from turnwise.errors import ConfigError
from turnwise.protocols.command import OK
from turnwise.terminal import write_output
from turnwise_trl_bridge.command import check_installed, check_out, positive_int


class SftCommand:
    """Trains on the rows that `turnwise convert --to sft` writes."""

    help = "fine-tune a model on demonstrations with TRL's SFTTrainer"

    def __init__(self, config: NoConfig, resources: Resources) -> None:
        """Ignore both: all options are on the command line."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = (
            "Examples:\n"
            "  turnwise convert tune.jsonl --to sft --model models/qwen3 --out sft.parquet\n"
            "  turnwise sft sft.parquet --model models/qwen3 --out runs/sft\n\n"
            "No row is cut. Writes the model, the tokenizer and log.json to DIR."
        )
        parser.add_argument("rows", type=Path, help="Parquet file of `turnwise convert --to sft` for this model")
        parser.add_argument("--model", required=True, type=Path, metavar="DIR", help="folder of the model")
        parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="output folder, empty or missing")
        parser.add_argument("--epochs", type=positive_int, default=1, help="passes over the rows (default 1)")
        parser.add_argument("--batch-size", type=positive_int, default=8, help="rows per step (default 8)")
        parser.add_argument("--learning-rate", type=float, default=1e-5, help="learning rate of AdamW (default 1e-5)")
        parser.add_argument("--seed", type=int, default=0, help="seed of the order of rows (default 0)")

    def run(self, arguments: argparse.Namespace) -> int:
        check_installed("sft")
        if not arguments.model.is_dir():
            raise ConfigError(f"--model {arguments.model}: no such folder")
        check_out(arguments.out)
        from turnwise_trl_bridge.sft import train_sft

        log = train_sft(arguments)
        (arguments.out / "log.json").write_text(json.dumps(log, indent=2) + "\n", encoding="utf-8")
        losses = [entry["loss"] for entry in log if "loss" in entry]
        write_output(f"{len(losses)} steps; loss {losses[0]:.3f} in the first, {losses[-1]:.3f} in the last\n")
        return OK
