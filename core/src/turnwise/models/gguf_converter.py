"""
The process that converts a GGUF file: `python -m turnwise.models.gguf_converter FILE FOLDER`.

On a failure it prints one JSON object with the class of the error, the first line of its text, and the system's number.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

from turnwise.errors import first_line
from turnwise.files import raise_disk_error, share_weights


def convert(file: Path, folder: Path) -> None:
    """Write weights, config, tokenizer and chat template of a file to a folder, as `from_pretrained` reads them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # transformers leaves it so
    source = {"gguf_file": file.name, "local_files_only": True}
    # The model first: an architecture that is not supported is found before minutes of work on a tokenizer.
    loaded: Any = AutoModelForCausalLM.from_pretrained(str(file.parent), dtype=torch.float32, **source)
    tokenizer: Any = AutoTokenizer.from_pretrained(str(file.parent), **source)
    # Transformers saves no model that was loaded from a GGUF file, so the weights move to one that was not.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain, weights = type(loaded)(config).to(torch.float32), loaded.state_dict()
    for name, expected in plain.state_dict().items():
        if (found := weights[name].shape) != expected.shape:  # loaded with a warning alone
            raise ValueError(
                f"{name} of the shape {[*found]} is not supported: transformers expects {[*expected.shape]}"
            )
    plain.load_state_dict(weights)
    if tokenizer.eos_token_id is not None:
        plain.generation_config.eos_token_id = tokenizer.eos_token_id
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    share_weights(folder)


def main() -> int:
    """Convert, and print the error if that fails; return the exit code."""
    file, folder = map(Path, sys.argv[1:])
    warnings.simplefilter("ignore")
    try:
        try:
            convert(file, folder)
        except Exception as error:
            raise_disk_error(error)
            raise
    except Exception as error:  # noqa: BLE001 - the parent process names the file and the hint
        number = error.errno if isinstance(error, OSError) else None
        report = {"kind": type(error).__name__, "text": first_line(error), "errno": number}
        sys.stdout.write(json.dumps(report) + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
