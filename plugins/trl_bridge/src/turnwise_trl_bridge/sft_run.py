"""Fine-tunes a model in a folder: its options, its log, and what `--resume` finds."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve

from turnwise.errors import ConfigError, DataError
from turnwise.files import expanded, partial_path, raise_disk_error, write_text
from turnwise.models.finding import find_model
from turnwise.models.location import FoundModel, ModelSource
from turnwise.protocols.command import OK
from turnwise.terminal import write_error, write_output
from turnwise.types import JsonObject
from turnwise_result_files.folder_lock import make_folder, removed_folder, writing_to
from turnwise_trl_bridge.command import check_installed, check_out

if TYPE_CHECKING:
    import pyarrow as pa

OPTIONS_FILE: Final = "sft.json"
"""The options of the training; the first file, so a folder with it may be written to again."""
LOG_FILE: Final = "log.json"
"""The last file: where it exists, the model is complete."""


def fine_tune(arguments: argparse.Namespace) -> int:
    """Train the model, unless it is complete, and return the exit code."""
    check_installed("sft")
    out = arguments.out
    from turnwise_trl_bridge.sft_rows import read_rows

    (make_folder if arguments.resume else check_out)(out)
    rows = read_rows(arguments.rows)
    model = find_model(_source(arguments))
    options = _options(arguments, model)
    with writing_to(out, "the same command with --resume trains again"):
        if arguments.resume and _is_complete(out, options):
            write_error(f"turnwise: {out}: the model is complete\n")
            return OK
        options_text = json.dumps(options, indent=2) + "\n"
        write_text(out / OPTIONS_FILE, options_text)
        try:
            log = _train(arguments, model.folder, rows)
        except DataError:
            (out / OPTIONS_FILE).unlink(missing_ok=True)  # the folder is empty again, for the mended rows
            raise
        except KeyboardInterrupt:
            write_error(f"turnwise: {out} has no complete model; the same command with --resume trains again\n")
            raise
        if not (out / OPTIONS_FILE).exists():
            write_text(out / OPTIONS_FILE, options_text)  # TRL made the folder anew; --resume may write there
            raise removed_folder(out)
        write_text(out / LOG_FILE, json.dumps(log, indent=2) + "\n")
    losses = [entry["loss"] for entry in log if "loss" in entry]
    write_output(f"{len(losses)} steps; loss {losses[0]:.3f} in the first, {losses[-1]:.3f} in the last\n")
    return OK


def _source(arguments: argparse.Namespace) -> ModelSource:
    """Return where the model is; a training that is resumed keeps the commit that it started with."""
    source = ModelSource(path=arguments.model, base_dir=Path.cwd(), revision=arguments.revision, key="--model")
    if not (arguments.resume and source.is_on_hub and (arguments.out / OPTIONS_FILE).exists()):
        return source
    before = _read_options(arguments.out)
    is_same = (before.get("model"), before.get("revision")) == (arguments.model, arguments.revision)
    commit = before.get("commit")
    return evolve(source, commit=commit) if is_same and isinstance(commit, str) else source


def _options(arguments: argparse.Namespace, model: FoundModel) -> JsonObject:
    """Return the options that decide the model."""
    names = ("epochs", "batch_size", "learning_rate", "seed")
    of_hub = {"revision": arguments.revision, "commit": model.commit} if model.commit else {}
    path = arguments.model if model.commit else str(expanded(arguments.model).absolute())
    # A file of the same name may have other rows by now: the model of the old ones must not pass for theirs.
    with arguments.rows.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    paths = {"rows": str(arguments.rows.absolute()), "rows_sha256": digest, "model": path, **of_hub}
    return paths | {name: getattr(arguments, name) for name in names}


def _read_options(out: Path) -> JsonObject:
    try:
        options = json.loads((out / OPTIONS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--resume: {out} is not empty, and no training of turnwise sft: {error}") from error
    if not isinstance(options, dict):
        raise ConfigError(f"--resume: {out} is not empty, and no training of turnwise sft: {OPTIONS_FILE} is no object")
    return options


def _is_complete(out: Path, options: JsonObject) -> bool:
    """Return whether a folder has the whole model; `ConfigError` if it has something else than such a training."""
    partial_path(out / OPTIONS_FILE).unlink(missing_ok=True)
    if not any(out.iterdir()):
        return False
    before = _read_options(out)
    for name, value in options.items():
        if before.get(name) != value:
            raise ConfigError(f"--resume: {out} has another training: {name} is {before.get(name)!r}, not {value!r}")
    return (out / LOG_FILE).exists()


def _train(arguments: argparse.Namespace, model: Path, rows: pa.Table) -> list[dict[str, Any]]:
    from safetensors import SafetensorError

    from turnwise_trl_bridge.sft import train_sft

    try:
        return train_sft(arguments, model, rows)
    except SafetensorError as error:
        raise_disk_error(error)
        raise
