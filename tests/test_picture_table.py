"""The table of families in `docs/how-to/use-pictures.md` says what chats, engines and trainer really take."""

from __future__ import annotations

import importlib.util
import json
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from turnwise.protocols import Resources
from turnwise_engine_support.picture_families import FAMILIES, find_family
from turnwise_sglang_engine import SglangConfig, SglangEngine
from turnwise_transformers_engine import TransformersConfig, TransformersEngine
from turnwise_vllm_engine import VllmConfig, VllmEngine

ROOT = Path(__file__).parents[1]
ENGINES: dict[str, tuple[Any, Any]] = {
    "transformers": (TransformersConfig, TransformersEngine),
    "vLLM": (VllmConfig, VllmEngine),
    "SGLang": (SglangConfig, SglangEngine),
}
CHATS = {"mistral3": "pixtral", "aya_vision": "aya"}
"""Names in the tests of chats that are more than another spelling of the model's type."""


def read_rows() -> list[dict[str, str]]:
    """Return the rows of the table by the names of columns."""
    text = (ROOT / "docs/how-to/use-pictures.md").read_text(encoding="utf-8")
    lines = text.partition("| family |")[2].splitlines()
    table = takewhile(lambda line: line.startswith("|"), lines[1:])
    head, _ruler, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in ("| family |" + lines[0], *table)
    )
    return [dict(zip(head, row, strict=True)) for row in rows]


ROWS = {row["`model_type`"].strip("`"): row for row in read_rows()}


@pytest.fixture(scope="module")
def chats() -> Any:
    """The module of the tests of chats that lists their families."""
    file = ROOT / "libs/chat_templates/tests/picture_families.py"
    spec = importlib.util.spec_from_file_location("families_of_chats", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # attrs asks for it
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("model_type", ROWS)
def test_engines_and_trainer(model_type, tmp_path):
    """Each engine has the capability for exactly the rows that say yes, and the trainer reads the same families."""
    tower = {"model_type": "clip_vision_model"}
    text = {"rope_theta": 10000.0, "max_position_embeddings": 64}
    config = {"model_type": model_type, "vision_config": tower, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    found = {}
    for name, (make_config, engine) in ENGINES.items():
        found[name] = engine(make_config(model=tmp_path), Resources()).capabilities.pictures
    found["trainer"] = find_family(tmp_path) is not None
    assert found == {name: ROWS[model_type][name] == "yes" for name in found}


def test_every_family_has_a_row():
    """No family is missing."""
    assert {each.model_type for each in FAMILIES} <= ROWS.keys()


def test_records(chats):
    """The chat's own proof covers exactly the rows that say yes, or yes with a package."""
    names = {key: CHATS.get(key, key) for key in ROWS}
    spelled = {name.replace("-", "").replace(".", "").replace("_", ""): name for name in chats.FAMILIES}
    told = {}
    for key, name in names.items():
        family = chats.FAMILIES.get(spelled.get(name.replace("_", ""), ""))
        told[key] = "no" if family is None else f"with `{family.needs}`" if family.needs else "yes"
    assert told == {key: row["records"] for key, row in ROWS.items()}
    assert len([each for each in told.values() if each != "no"]) == len(chats.FAMILIES)
    assert len([each for each in told.values() if each == "no"]) == len(chats.REFUSED_FAMILIES)
