"""A folder with a run of ten scripted episodes."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cli_runs import ODD_PARTS

from turnwise_testing.whole_runs.installation import install_plugin
from turnwise_testing.whole_runs.scripted_run import PLUGIN, SITE, write_scripted_run


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """A folder with a model's tokenizer, a data set of five rows, a config and the plugins that it needs."""
    write_scripted_run(tmp_path, plugins=[PLUGIN, "acme_odd", "plain_functions"])
    install_plugin(tmp_path / SITE, "acme_odd", ODD_PARTS)
    monkeypatch.syspath_prepend(str(tmp_path / SITE))
    monkeypatch.delitem(sys.modules, "acme_odd", raising=False)
    return tmp_path


@pytest.fixture
def site(run_dir):
    """The folder of the installed plugins."""
    return run_dir / SITE
