"""Trains with TRL's SFTTrainer on rows of token ids and labels, for `turnwise sft`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from turnwise.errors import DataError
from turnwise_trl_bridge.training import save

_COLUMNS = ["input_ids", "labels"]


def train_sft(arguments: argparse.Namespace, model: Path) -> list[dict[str, Any]]:
    """Train the model of a folder, save it and return the trainer's log."""
    rows = _read_rows(arguments.rows)
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=SFTConfig(
            output_dir=str(arguments.out),
            # TRL would cut rows after 1,024 tokens.
            max_length=None,
            num_train_epochs=arguments.epochs,
            per_device_train_batch_size=arguments.batch_size,
            learning_rate=arguments.learning_rate,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            # An interrupt would print the bar behind the last line.
            disable_tqdm=not sys.stderr.isatty(),
            bf16=torch.cuda.is_available(),
            seed=arguments.seed,
        ),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    return save(trainer, arguments)


def _read_rows(path: Path) -> Dataset:
    """Return the rows of a file as SFTTrainer takes them; it leaves rows with labels as they are."""
    try:
        with pq.ParquetFile(path) as file:
            if not set(_COLUMNS) <= set(file.schema_arrow.names) or file.metadata.num_rows == 0:
                raise DataError(
                    f"{path}: expected rows with input_ids and labels, as `turnwise convert --to sft` writes them"
                )
            return Dataset.from_dict(file.read(_COLUMNS).to_pydict())
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from error
