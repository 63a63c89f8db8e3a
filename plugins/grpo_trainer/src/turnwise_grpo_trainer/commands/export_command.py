"""`turnwise export`: turns a checkpoint of a training into a model folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from turnwise.errors import ConfigError
from turnwise.plugin.registry import NoConfig
from turnwise.protocols import Resources
from turnwise.terminal import write_output

OK: Final = 0
_EPILOG: Final = """\
Examples:
  turnwise export runs/train --to models/calculator
  turnwise export runs/train --to models/calculator --checkpoint best
  turnwise export runs/train --to models/calculator --checkpoint 40 --dtype bfloat16
  turnwise export runs/lora --to models/calculator --merge

RUN is the output folder of `turnwise train`, which may still be running. FOLDER can be loaded with from_pretrained of
transformers: weights as safetensors, config, tokenizer, and a model card with the config of the training and the
held-out results. The config and the tokenizer come from the model that the training started from. A training with
train.lora becomes an adapter folder of peft; --merge writes the whole model.
Exit codes: 0; 2 for bad input; 1 if it failed.
"""


class ExportCommand:
    """Writes the model of a checkpoint."""

    help = "write a checkpoint of a training as a model folder for from_pretrained"

    def __init__(self, config: NoConfig, resources: Resources) -> None:
        pass

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = _EPILOG
        parser.add_argument("run", type=Path, metavar="RUN", help="output folder of a training")
        parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="folder to write; must be new")
        parser.add_argument(
            "--checkpoint", default="latest", metavar="WHICH", help="latest, best, or a step (default: latest)"
        )
        parser.add_argument("--model", help="the initial model, if it has moved: folder, id on the hub, or .gguf file")
        parser.add_argument(
            "--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights (default: as trained)"
        )
        parser.add_argument("--merge", action="store_true", help="merge the adapters of train.lora into the weights")
        parser.add_argument("--overwrite", action="store_true", help="replace FOLDER")

    def run(self, arguments: argparse.Namespace) -> int:
        try:
            from turnwise_grpo_trainer.commands.exporting import export_checkpoint
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"turnwise export needs {error.name}: pip install 'turnwise-grpo-trainer[train]'"
            ) from error
        step = export_checkpoint(
            arguments.run,
            arguments.to,
            which=arguments.checkpoint,
            model=arguments.model,
            dtype=arguments.dtype,
            overwrite=arguments.overwrite,
            merge=arguments.merge,
        )
        write_output(f"wrote {arguments.to}: the model after step {step} of {arguments.run}\n")
        return OK
