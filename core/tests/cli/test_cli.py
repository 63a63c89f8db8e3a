"""The program `turnwise`: its commands, help, and the list of plugins."""

import errno
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from turnwise.cli import _Parser, _run, main
from turnwise.errors import ConfigError
from turnwise_testing.whole_runs.installation import install_plugin

PLUGIN = """
import turnwise


@turnwise.hookimpl
def register_engines(registry):
    registry.add("scripted", lambda config, resources: None)
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder with an installed plugin."""
    folder = tmp_path / "site"
    install_plugin(folder, "acme_kit", PLUGIN)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "acme_kit", raising=False)
    return folder


class TestPlugins:
    """`turnwise plugins`."""

    def test_plugins_json(self, site, capsys):
        """
        A plugin that pip installed appears with its registrations.
        """
        assert main(["plugins", "--json"]) == 0
        plugins = {p["name"]: p for p in json.loads(capsys.readouterr().out)["plugins"]}

        assert plugins["acme_kit"]["version"] == "1.0"
        assert plugins["acme_kit"]["registers"]["engines"] == ["scripted"]
        assert plugins["builtins"]["state"] == "ok"

    def test_a_broken_plugin_is_listed(self, site, capsys):
        """
        A plugin that cannot be imported is reported, and the command works all the same.
        """
        (site / "acme_kit.py").write_text("import no_such_module_anywhere\n")
        assert main(["plugins", "--json"]) == 0
        assert "no_such_module_anywhere" in capsys.readouterr().out

    def test_plugins_needs_no_torch(self):
        """
        Listing plugins in a fresh interpreter imports neither torch nor an engine.
        """
        code = (
            "import sys; from turnwise.cli import main; main(['plugins', '--json'])\n"
            "print(*[m for m in ('torch', 'transformers', 'ray', 'vllm') if m in sys.modules], file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

        assert (done.returncode, done.stderr.split()) == (0, [])


@pytest.mark.parametrize("command", [[], ["plugins"]])
def test_help_has_examples(command, capsys):
    """
    Every help text ends with commands that can be copied.
    """
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--help"])
    assert "Examples:" in capsys.readouterr().out


def test_module_runs():
    """
    `python -m turnwise.cli` is the command.
    """
    done = subprocess.run(
        [sys.executable, "-m", "turnwise.cli", "--help"], capture_output=True, text=True, check=False, cwd=Path.cwd()
    )
    assert done.returncode == 0
    assert "plugins" in done.stdout


def test_an_unknown_command_is_one_line(capsys):
    """The line has the closest command; with a package that has the command, it has that too (see `test_host`)."""
    assert 2 == main(["plugin"])
    assert "turnwise: error: unknown command 'plugin'; did you mean 'plugins'?" in capsys.readouterr().err


def test_a_closed_standard_error():
    """A command that has no place for its error has its exit code."""
    command = ["sh", "-c", 'exec "$0" -m turnwise.cli plugin 2>&-', sys.executable]
    assert subprocess.run(command, capture_output=True).returncode == 2


def test_a_closed_standard_output():
    """A command whose output goes nowhere succeeds."""
    command = ["sh", "-c", 'exec "$0" -m turnwise.cli plugins --json >&-', sys.executable]
    assert subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize("command", ["plugins", "plugins --json"])
def test_an_output_without_space(command):
    """A full disk is no defect of a command: one line, for a short output and for a long one."""
    program = ["sh", "-c", f'exec "$0" -m turnwise.cli {command} >/dev/full', sys.executable]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].endswith("OSError: [Errno 28] No space left on device")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("limit", ["ENOSPC", "EDQUOT", "EFBIG", "no temporary folder"])
def test_a_command_on_a_full_disk_is_one_line(limit, monkeypatch, tmp_path):
    """Whichever error the system or the library has for it."""

    def run(_options):
        if limit.isupper():
            raise OSError(getattr(errno, limit), "no more")
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
        tempfile.gettempdir()

    with pytest.raises(ConfigError, match=r"^command 'acme': .*(no more|No usable temporary directory)"):
        _run(SimpleNamespace(command=SimpleNamespace(run=run)), "command 'acme'")


@pytest.mark.parametrize("limit", ["EACCES", "EPERM", "EROFS", "ENAMETOOLONG", "ELOOP", "ENOTDIR", "EISDIR"])
@pytest.mark.parametrize("form", [str, Path])
def test_a_path_that_the_system_refuses_is_one_line(limit, form):
    """It names the path, which is the user's."""

    def run(_options):
        raise OSError(getattr(errno, limit), "no way", form("runs/first"))

    with pytest.raises(ConfigError, match=r"^runs/first: no way$"):
        _run(SimpleNamespace(command=SimpleNamespace(run=run)), "command 'acme'")


@pytest.mark.parametrize("values", [(errno.ENOENT, "none", "x"), (errno.EACCES, "no port"), (errno.EBADF, "bad", "x")])
def test_other_errors_of_the_system_keep_their_traceback(values, capsys):
    """A file that is missing may be a defect of the command, and an error without a path is about none."""

    def run(_options):
        raise OSError(*values)

    assert 1 == _run(SimpleNamespace(command=SimpleNamespace(run=run)), "command 'acme'")
    assert "Traceback" in capsys.readouterr().err


def test_the_usage_is_that_of_the_command(capsys):
    """An unknown option shows the options of its command, and not the list of commands."""
    with pytest.raises(SystemExit, match="2"):
        main(["plugins", "--jsn"])
    printed = capsys.readouterr().err
    assert "usage: turnwise plugins [-h] [--json]" in printed
    assert "unrecognized arguments: --jsn" in printed


@pytest.mark.parametrize("words", [["--out", ""], ["--out="], ["--in-a-group", ""]])
def test_an_empty_path_is_refused(words, capsys):
    """A variable of a shell that is not set would be the working directory."""
    parser = _Parser(prog="turnwise")
    parser.add_argument("--out", type=Path)
    parser.add_mutually_exclusive_group().add_argument("--in-a-group", type=Path)
    assert parser.parse_args(["--out", "x"]).out == Path("x")

    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(words)
    assert "expected a path, got an empty text" in capsys.readouterr().err
