"""The model card of an exported model: its origin, its held-out results, and the config that trained it."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Final

from turnwise import RunConfig
from turnwise.config.structuring import structure
from turnwise.files import write_text
from turnwise_grpo_trainer.config import TrainConfig
from turnwise_grpo_trainer.report.held_out import Validations
from turnwise_grpo_trainer.report.learning_curve import as_markdown, compare_validations
from turnwise_grpo_trainer.report.run_config import describe_config

CARD_FILE: Final = "README.md"
_CARD: Final = """\
---
library_name: {library}
pipeline_tag: text-generation
tags:
- turnwise
- reinforcement-learning
- {algorithm}
---

# {name}

{content} after step {step} of {num_steps} of a training with turnwise {version}, from the model `{origin}`.

## Held-out tasks

{held_out}
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}"){note}
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

## Config

```yaml
{config}```
"""


def is_card(file: Path) -> bool:
    """Return whether a file is a card of `write_card`."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return text.startswith("---\n") and " of a training with turnwise " in text


def write_card(
    folder: Path, run: RunConfig, validations: Validations, step: int, *, name: str, adapters: bool = False
) -> None:
    """
    Write the model card of an exported model.

    Args:
        folder: of the model.
        run: the config of the training.
        validations: metrics by step; later ones than `step` are left out.
        step: after which the weights were saved.
        name: of the model.
        adapters: the folder has adapters, and not the whole model.
    """
    train = structure(dict(run.train), TrainConfig, path="train")
    text = _CARD.format(
        algorithm=train.algorithm.adv_estimator.name.replace("_", "-"),
        library="peft" if adapters else "transformers",
        content="The LoRA adapters" if adapters else "The weights",
        note="  # needs peft; it finds the base model in adapter_config.json" if adapters else "",
        name=name,
        step=step,
        num_steps=train.num_steps,
        version=version("turnwise"),
        origin=run.model.path if run.model.commit else Path(run.model.path or "unknown").name,
        held_out=_describe_results(validations, step),
        config=describe_config(run),
    )
    write_text(folder / CARD_FILE, text)


def _describe_results(validations: Validations, step: int) -> str:
    known = {each: metrics for each, metrics in validations.items() if each <= step}
    if not known:
        return "None were evaluated.\n"
    note = "" if max(known) == step else f"The last evaluation before the export was after step {max(known)}.\n\n"
    return f"{note}{as_markdown(compare_validations(known))}\nIntervals are 95 % bootstrap intervals over tasks.\n"
