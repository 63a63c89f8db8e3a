"""Trains with TRL's SFTTrainer on rows of token ids and labels, for `turnwise sft`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from turnwise.errors import InfrastructureError
from turnwise_engine_support.progress_bars import hide_progress_bars
from turnwise_trl_bridge.sft_rows import check_vocabulary
from turnwise_trl_bridge.training import save


def train_sft(arguments: argparse.Namespace, model: Path, rows: pa.Table) -> list[dict[str, Any]]:
    """
    Train the model of a folder, save it and return the trainer's log.

    Raises:
        DataError: a row has an id that the model does not have.
        InfrastructureError: a weight is no finite number at the end; nothing is saved.
    """
    hide_progress_bars()
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    embeddings: Any = policy.get_input_embeddings()  # typed as any attribute of a module
    check_vocabulary(arguments.rows, rows, embeddings.num_embeddings)
    trainer = SFTTrainer(
        policy,
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
            # Without a GPU, torch would warn twice.
            dataloader_pin_memory=torch.cuda.is_available(),
            seed=arguments.seed,
        ),
        # SFTTrainer leaves rows with labels as they are.
        train_dataset=Dataset.from_dict(rows.to_pydict()),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    if not all(torch.isfinite(each).all() for each in policy.parameters()):
        raise InfrastructureError("a weight is no finite number after the training; lower --learning-rate")
    return save(trainer, arguments)
