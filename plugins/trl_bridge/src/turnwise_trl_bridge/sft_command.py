"""The command `turnwise sft ROWS`: fine-tunes a model on demonstrations with TRL's SFTTrainer."""

from __future__ import annotations

import argparse
from pathlib import Path

from turnwise import NoConfig, Resources
from turnwise_trl_bridge.command import learning_rate, positive_int, seed


class SftCommand:
    """Trains on the rows that `turnwise convert --to sft` writes."""

    help = "fine-tune a model on demonstrations with TRL's SFTTrainer"

    def __init__(self, config: NoConfig, resources: Resources) -> None:
        """Ignore both: all options are on the command line."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from turnwise_trl_bridge.sft_run import LOG_FILE

        parser.epilog = (
            "Examples:\n"
            "  turnwise convert tune.jsonl --to sft --model models/qwen3 --out sft.parquet\n"
            "  turnwise sft sft.parquet --model models/qwen3 --out runs/sft\n\n"
            f"No row is cut. Writes the model, the tokenizer and {LOG_FILE} to DIR. The training has no checkpoints.\n"
            "A job may always pass --resume: it trains from the start if DIR has no complete model.\n"
            "Exit codes: 0; 2 for bad input; 130 if interrupted; 1 if it failed."
        )
        parser.add_argument("rows", type=Path, help="Parquet file of `turnwise convert --to sft` for this model")
        parser.add_argument(
            "--model",
            required=True,
            help="folder of the model, its id on the hub such as Qwen/Qwen3-0.6B, or a .gguf file",
        )
        parser.add_argument("--revision", help="branch, tag or commit of a model on the hub (default: its main branch)")
        parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="output folder, empty or missing")
        parser.add_argument("--resume", action="store_true", help="train again after an interrupt, or start")
        parser.add_argument("--epochs", type=positive_int, default=1, help="passes over the rows (default 1)")
        parser.add_argument("--batch-size", type=positive_int, default=8, help="rows per step (default 8)")
        parser.add_argument(
            "--learning-rate", type=learning_rate, default=1e-5, help="learning rate of AdamW (default 1e-5)"
        )
        parser.add_argument("--seed", type=seed, default=0, help="seed of the order of rows (default 0)")

    def run(self, arguments: argparse.Namespace) -> int:
        from turnwise_trl_bridge.sft_run import fine_tune

        return fine_tune(arguments)
