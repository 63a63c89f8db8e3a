"""Exports a checkpoint as a model folder: in one process, on the host, however many processes trained it."""

# ruff: noqa: TID253 - only the command imports this module; no hook does

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

import torch
from attrs import evolve

from turnwise import RunConfig
from turnwise.config.structuring import structure
from turnwise.errors import ConfigError
from turnwise.files import atomic_folder, check_writable, make_parents
from turnwise.models.finding import find_model
from turnwise.models.location import ModelSource
from turnwise.protocols import ModelSpec
from turnwise_grpo_trainer.config import TrainConfig
from turnwise_grpo_trainer.learner.lora import merged_weights, write_adapters
from turnwise_grpo_trainer.learner.model_files import copy_tokenizer, write_model
from turnwise_grpo_trainer.learner.model_state import load_policy_state
from turnwise_grpo_trainer.learner.models import load_policy
from turnwise_grpo_trainer.loop.checkpoints import (
    MODELS_FOLDER,
    CheckpointStore,
    check_checkpoint,
    parse_step,
    read_progress,
)
from turnwise_grpo_trainer.report.model_card import CARD_FILE, is_card, write_card
from turnwise_grpo_trainer.report.run_config import load_saved_config

_OPTION: Final = "--model"


def export_checkpoint(  # noqa: PLR0913 - the options of the command, by name
    out: Path, folder: Path, *, which: str, model: str | None, dtype: str | None, overwrite: bool, merge: bool
) -> int:
    """
    Write the policy of a checkpoint as a folder for `from_pretrained`, with a model card.

    A training with adapters becomes an adapter folder of peft, unless they are merged.

    Args:
        out: folder of the training.
        folder: appears complete or not at all.
        which: `latest`, `best`, or a step.
        model: folder, id or GGUF file of the initial model, if it is no longer where the config has it.
        dtype: data type of the weights; None leaves them as trained.
        overwrite: replace the folder if it is an earlier export or empty; any other one stays.
        merge: merge the adapters into the weights.

    Returns:
        The step of the checkpoint.

    Raises:
        ConfigError: no such checkpoint, a file of it was changed after it was written, the folder exists, or the
            initial model is missing or another one.
    """
    run = load_saved_config(out)
    checkpoint = _find_checkpoint(CheckpointStore(out), which)
    _check_target(folder, overwrite=overwrite)
    train = structure(dict(run.train), TrainConfig, path="train")
    if merge and train.lora is None:
        raise ConfigError(f"--merge: the training in {out} has no adapters; leave the option out")
    check_checkpoint(checkpoint)
    spec = run.model_spec(weights=True) if model is None else _moved(run, model)
    plain = evolve(train.policy, attn_implementation="sdpa", gradient_checkpointing=False)
    policy = load_policy(plain, spec, train.lora, key="model.path" if model is None else _OPTION)
    load_policy_state(policy, checkpoint / MODELS_FOLDER)
    weights = dict(merged_weights(policy, lambda tensor: tensor))  # merged before they lose precision
    if dtype is not None:
        policy = policy.to(getattr(torch, dtype))
        weights = {name: weight.to(policy.dtype) for name, weight in weights.items()}
    step = parse_step(checkpoint)
    progress = read_progress(checkpoint)
    adapters = train.lora is not None and not merge
    with atomic_folder(folder) as partial:
        if adapters:
            write_adapters(policy, partial)
            copy_tokenizer(Path(spec.path or "."), partial)
        else:
            write_model(policy, weights, Path(spec.path or "."), partial)
        write_card(partial, run, dict(progress["validations"]), step, name=folder.name, adapters=adapters)
        if folder.is_dir():
            shutil.rmtree(folder)
    return step


def _moved(run: RunConfig, path: str) -> ModelSpec:
    """Return the initial model at another place than the config's."""
    code, revision = run.model.trust_remote_code, run.model.revision
    found = find_model(ModelSource(path=path, base_dir=Path.cwd(), revision=revision, code=code, key=_OPTION))
    return ModelSpec(path=found.folder, name=found.name, commit=found.commit, trust_remote_code=code, revision=revision)


def _check_target(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder that cannot be written, or that holds anything but an exported model; see `export_checkpoint`."""
    if os.path.lexists(folder):
        if not overwrite:
            raise ConfigError(f"--to {folder}: exists; name another folder, or add --overwrite")
        if reason := _why_kept(folder):
            raise ConfigError(f"--to {folder}: stays, because it {reason}; name another folder")
    try:
        make_parents(folder)
        if folder.is_dir():
            check_writable(folder)
    except OSError as error:
        raise ConfigError(f"--to {folder}: {error.strerror}") from error


def _why_kept(folder: Path) -> str:
    """Return why a folder must not be removed for an export; an empty text if it is empty or an earlier export."""
    if folder.is_symlink() or not folder.is_dir():
        return "is a symbolic link" if folder.is_symlink() else "is a file"
    if os.path.ismount(folder) or folder.resolve() in (Path.cwd(), *Path.cwd().parents):
        return "is a mount, or the current folder or one above it"
    inside = sorted(folder.iterdir())
    if found := next((each for each in inside if each.is_symlink() or not each.is_file()), None):
        return f"has {found.name}, which no export writes"
    if inside and not is_card(folder / CARD_FILE):
        return f"has no {CARD_FILE} of an export"
    return ""


def _find_checkpoint(store: CheckpointStore, which: str) -> Path:
    if which == "best":
        return store.best()
    if which == "latest":
        latest = store.latest()
        if latest is None:
            raise ConfigError(f"{store.out}: has no checkpoint")
        return latest
    steps = [parse_step(path) for path in store.paths()]
    if not which.isdecimal() or int(which) not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise ConfigError(f"--checkpoint {which}: expected latest, best, or a step with a checkpoint; known: {known}")
    return store.folder_of(int(which))
