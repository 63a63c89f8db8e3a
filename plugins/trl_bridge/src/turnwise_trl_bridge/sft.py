"""Trains with TRL's SFTTrainer on rows of token ids and labels, for `turnwise sft`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from turnwise.errors import DataError, InfrastructureError
from turnwise.models.loaded_weights import refuse_missing
from turnwise_engine_support.picture_families import check_grids, supports_grids
from turnwise_engine_support.pictures import PictureReader
from turnwise_engine_support.progress_bars import hide_progress_bars
from turnwise_trl_bridge.picture_inputs import copy_processor
from turnwise_trl_bridge.sft_pictures import PictureCollator, PictureSFTTrainer
from turnwise_trl_bridge.sft_rows import PICTURES, check_vocabulary
from turnwise_trl_bridge.training import save


def train_sft(arguments: argparse.Namespace, model: Path, rows: pa.Table) -> list[dict[str, Any]]:
    """
    Train the model of a folder, save it and return the trainer's log.

    Raises:
        ConfigError: the model lacks weights, or is a vision-language model of a family that TRL's trainer is not given
            pictures of.
        DataError: a row has an id that the model does not have, or a picture that the model does not read.
        InfrastructureError: a weight is no finite number at the end; nothing is saved.
    """
    hide_progress_bars()
    check_grids(model, "turnwise sft")
    has_vision = supports_grids(model)
    if PICTURES in rows.column_names and not has_vision:
        raise DataError(f"{arguments.rows}: the rows have pictures, which the model of {str(model)!r} does not read")
    kind: Any = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
    policy, info = kind.from_pretrained(model, dtype=torch.float32, output_loading_info=True)
    refuse_missing(f"--model: {str(model)!r}", info["missing_keys"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    embeddings: Any = policy.get_input_embeddings()  # typed as any attribute of a module
    check_vocabulary(arguments.rows, rows, embeddings.num_embeddings)
    trainer = (PictureSFTTrainer if has_vision else SFTTrainer)(
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
            # The collator reads the pictures of rows, which are no inputs of the model.
            remove_unused_columns=not has_vision,
        ),
        data_collator=_collator(arguments.rows, model, policy, tokenizer) if has_vision else None,
        # SFTTrainer leaves rows with labels as they are.
        train_dataset=Dataset.from_dict(rows.to_pydict()),
        processing_class=tokenizer,
    )
    trainer.train()
    if not all(torch.isfinite(each).all() for each in policy.parameters()):
        raise InfrastructureError("a weight is no finite number after the training; lower --learning-rate")
    log = save(trainer, arguments)
    if has_vision:
        copy_processor(model, arguments.out)
    return log


def _collator(rows: Path, model: Path, policy: object, tokenizer: Any) -> PictureCollator:
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return PictureCollator(model=policy, reader=PictureReader(model), folder=rows.parent, pad_token_id=pad)
