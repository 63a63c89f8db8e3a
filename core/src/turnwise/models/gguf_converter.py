"""
The process that converts a GGUF file: `python -m turnwise.models.gguf_converter FILE FOLDER`.

On a failure it prints one JSON object with the class of the error, the first line of its text, and the system's number.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from turnwise.errors import ConfigError, first_line
from turnwise.files import raise_disk_error, share_weights
from turnwise.models.loaded_weights import refuse_missing

_WEIGHT: Final = ".weight"


def convert(file: Path, folder: Path) -> None:
    """
    Write weights, config, tokenizer and chat template of a file to a folder, as `from_pretrained` reads them.

    Raises:
        ConfigError: the file is part of a model, or has something that transformers would leave out; nothing is
            written.
    """
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    reader = GGUFReader(file)
    _check_parts(reader)
    _check_positions(reader)
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # transformers leaves it so
    source = {"gguf_file": file.name, "local_files_only": True}
    # The model first: an architecture that is not supported is found before minutes of work on a tokenizer.
    kind: Any = AutoModelForCausalLM  # its types do not know the pair that is returned
    loaded, info = kind.from_pretrained(str(file.parent), dtype=torch.float32, output_loading_info=True, **source)
    _check_tensors(reader, loaded, info["missing_keys"])
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


def _check_parts(reader: Any) -> None:
    if (count := _value(reader, "split.count", 1)) > 1:
        raise ConfigError(
            f"it is one of {count} parts of a model; merge them with `llama-gguf-split --merge` of llama.cpp and name"
            " the merged file"
        )


def _check_positions(reader: Any) -> None:
    """Refuse scaled positions: transformers ignores their keys and would compute other ones."""
    prefix = f"{_value(reader, 'general.architecture', '')}.rope."
    # A file without the type has linear scaling in llama.cpp; a factor of 0 or 1 changes nothing.
    kind = _value(reader, f"{prefix}scaling.type", "linear")
    factor = _value(reader, f"{prefix}scaling.factor", _value(reader, f"{prefix}scale_linear", 1))
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return
    raise ConfigError(f"its scaling of positions ({prefix}scaling, {kind}) is not supported by transformers")


def _check_tensors(reader: Any, model: Any, missing: Iterable[str]) -> None:
    """Refuse a file that lacks tensors, which transformers would fill at random, or has some that it leaves out."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    refuse_missing("it", missing)
    processor = TENSOR_PROCESSORS.get(_value(reader, "general.architecture", ""), TensorProcessor)()  # type: ignore[no-untyped-call]  # transformers leaves it so
    # The table has the tensors of all experts of a layer without the end.
    known = {name.removesuffix(_WEIGHT) for name in get_gguf_hf_weights_map(model, processor)}
    if ignored := [each.name for each in reader.tensors if each.name.removesuffix(_WEIGHT) not in known]:
        raise ConfigError(f"{len(ignored)} of its tensors, such as {ignored[0]!r}, are not supported by transformers")


def _value(reader: Any, key: str, default: Any) -> Any:
    found = reader.get_field(key)
    return default if found is None else found.contents()


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
