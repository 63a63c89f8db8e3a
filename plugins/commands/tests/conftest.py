"""A folder with a run of ten scripted episodes."""

import json
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from cli_runs import PLUGIN

from turnwise_testing.installation import install_plugin
from turnwise_testing.tokenizers import byte_tokenizer


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder with an installed plugin: an engine, an agent and a reward that need no model."""
    folder = tmp_path / "site"
    install_plugin(folder, "acme_kit", PLUGIN)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "acme_kit", raising=False)
    return folder


@pytest.fixture
def run_dir(tmp_path, site):
    """A folder with a model's tokenizer, a data set of five rows and a config."""
    byte_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"messages": [{"role": "user", "content": f"Question {i}"}]} for i in range(5)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = {
        "model": {"path": "model"},
        "data": {"path": "data.jsonl"},
        "engine": "scripted",
        "agent": "once",
        "reward": "length",
        "rollout": {"n": 2, "prompt_length": 64, "response_length": 64},
        "plugins": ["acme_kit"],
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return tmp_path
