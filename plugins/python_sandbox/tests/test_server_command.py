"""Command lines and environments of fork servers: the box of tier 1, the descriptors of tier 2, the user of both."""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from turnwise_python_sandbox import SandboxConfig, SandboxUnavailableError, Tier, server_command
from turnwise_python_sandbox.inherited_paths import InheritedPaths
from turnwise_python_sandbox.interpreter import DEVICES, PACKAGE, Interpreter
from turnwise_python_sandbox.server_command import (
    ServerSpec,
    build_bubblewrap_arguments,
    build_environment,
    build_landlock_command,
    build_namespaces_command,
    find_unprivileged_uid,
)

OTHER_UID = 60123


@pytest.fixture
def interpreter(tmp_path: Path) -> Interpreter:
    """An interpreter in a directory that only its owner may enter."""
    home = tmp_path / "closed/home"
    for folder in ("lib", "bin", "packages"):
        (home / folder).mkdir(parents=True)
    (home / "bin/python").touch()
    home.parent.chmod(0o700)
    for parent in (tmp_path, *tmp_path.parents[:-2]):
        parent.chmod(parent.stat().st_mode | 0o055)
    return Interpreter(executable=f"{home}/bin/python", home=str(home), packages=(f"{home}/packages",))


@pytest.fixture
def spec(interpreter: Interpreter) -> ServerSpec:
    """A tier 2 server of the user who runs the test."""
    return ServerSpec(tier=Tier.LANDLOCK, interpreter=interpreter, config=SandboxConfig(), uid=None)


@pytest.fixture(autouse=True)
def bwrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are only built, so that bubblewrap need not be installed."""
    monkeypatch.setattr(server_command.shutil, "which", lambda name: f"/usr/bin/{name}")


def find_values(command: list[str], option: str) -> list[str]:
    """Return the first value of each use of an option."""
    return [command[index + 1] for index, word in enumerate(command) if word == option]


def test_the_box_shows_only_what_it_is_given() -> None:
    """The only binds are the readable paths, read-only, and the five devices; there is no /proc and no /sys."""
    command = build_bubblewrap_arguments(["/lib", "/usr/lib"], "/tmp")

    assert ["/lib", "/usr/lib"] == find_values(command, "--ro-bind")
    assert list(DEVICES) == find_values(command, "--dev-bind")
    forbidden = {"--bind", "--proc", "--dev", "--share-net", "--tmpfs", "--bind-try", "--ro-bind-try"}
    assert forbidden.isdisjoint(command)


def test_the_box_has_every_namespace_and_no_terminal() -> None:
    """Everything is unshared, the box dies with its parent, and it has no controlling terminal."""
    command = build_bubblewrap_arguments([], "/tmp")

    assert {"--unshare-all", "--die-with-parent", "--new-session"} <= set(command)
    assert (["ALL"], ["CAP_SYS_ADMIN"]) == (find_values(command, "--cap-drop"), find_values(command, "--cap-add"))


def test_the_root_of_the_box_becomes_read_only_last() -> None:
    """The workspace directory exists before the root is read-only, since nothing can be created after."""
    command = build_bubblewrap_arguments(["/lib"], "/sandbox")

    assert command.index("--dir") < command.index("--remount-ro")
    assert max(index for index, word in enumerate(command) if word == "--ro-bind") < command.index("--remount-ro")
    assert (["/sandbox"], ["/"], ["/sandbox"]) == tuple(
        find_values(command, option) for option in ("--dir", "--remount-ro", "--chdir")
    )


def test_without_bubblewrap_the_error_names_the_remedy(monkeypatch) -> None:
    """The text says how to install it."""
    monkeypatch.setattr(server_command.shutil, "which", lambda _name: None)

    with pytest.raises(SandboxUnavailableError, match="apt-get install bubblewrap"):
        build_bubblewrap_arguments([], "/tmp")


def test_an_interpreter_in_tmp_stays_visible() -> None:
    """Programs have their files in /tmp, unless that would hide a path that they need."""
    choose = server_command._choose_workspace_root

    assert "/tmp" == choose(["/usr/lib", "/tmpfiles", "/opt/tmp/python"])
    assert "/sandbox" == choose(iter(["/usr/lib", "/tmp/venv/lib"]))


def test_the_box_and_its_server_agree_on_the_directory(spec: ServerSpec, monkeypatch) -> None:
    """If turnwise itself lies in /tmp, the box has another directory, and the server uses that one."""
    for package, root in (("/tmp/venv/lib/turnwise_python_sandbox", "/sandbox"), ("/opt/turnwise", "/tmp")):
        monkeypatch.setattr(server_command, "PACKAGE", package)
        interpreter = evolve(spec.interpreter, executable="/opt/python", home="/opt", packages=())
        command = build_namespaces_command(evolve(spec, tier=Tier.NAMESPACES, interpreter=interpreter), 7)

        assert [root] == find_values(command, "--dir")
        assert root == json.loads(command[-1])["workspace_root"]


@pytest.mark.parametrize("tier", [Tier.NAMESPACES, Tier.LANDLOCK])
def test_a_closed_directory_of_packages_is_an_error(spec: ServerSpec, tier: Tier) -> None:
    """Programs could import nothing from it; the error names the directory, the user and the hint."""
    closed = spec.interpreter.packages[0]
    os.chmod(closed, 0o700)
    inherited = InheritedPaths()
    other = evolve(spec, tier=tier, uid=OTHER_UID)
    build = {
        Tier.NAMESPACES: lambda: build_namespaces_command(other, 7),
        Tier.LANDLOCK: lambda: build_landlock_command(other, 7, "/tmp/programs", inherited),
    }

    with pytest.raises(SandboxUnavailableError, match=rf"user {OTHER_UID}.*may not enter {closed}; .*chmod o\+rx"):
        build[tier]()
    inherited.close()


def test_the_environment_is_built_from_nothing(spec: ServerSpec, monkeypatch) -> None:
    """No variable of this process reaches a program."""
    monkeypatch.setenv("API_KEY", "secret")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    environment = build_environment(spec)

    assert {"API_KEY", "PYTHONPATH", "HOME", "LD_PRELOAD", "LD_LIBRARY_PATH"}.isdisjoint(environment)
    assert spec.interpreter.home == environment["PYTHONHOME"]
    assert "0" == environment["PYTHONHASHSEED"]


def test_a_hidden_home_is_reached_through_a_descriptor(spec: ServerSpec) -> None:
    """In tier 2 the other user finds the library by descriptor, and the linker too."""
    inherited = InheritedPaths()
    environment = build_environment(evolve(spec, uid=OTHER_UID), inherited)

    assert f"/proc/self/fd/{inherited.fds[0]}" == environment["PYTHONHOME"]
    assert f"/proc/self/fd/{inherited.fds[0]}/lib" == environment["LD_LIBRARY_PATH"]
    assert os.path.samefile(environment["PYTHONHOME"], spec.interpreter.home)
    inherited.close()


def test_the_box_of_another_user_needs_no_descriptor(spec: ServerSpec) -> None:
    """In tier 1 the home keeps its path, because a mount namespace shows it there."""
    inherited = InheritedPaths()
    environment = build_environment(evolve(spec, tier=Tier.NAMESPACES, uid=OTHER_UID), inherited)

    assert (spec.interpreter.home, []) == (environment["PYTHONHOME"], inherited.fds)


def test_a_reachable_path_keeps_its_name(tmp_path) -> None:
    """Nothing is opened for the own user, nor for a path that the other user can reach."""
    inherited = InheritedPaths()

    assert str(tmp_path) == inherited.make_reachable(str(tmp_path), None)
    assert "/usr/lib" == inherited.make_reachable("/usr/lib", OTHER_UID)
    assert [] == inherited.fds


def test_a_path_is_opened_once(interpreter: Interpreter) -> None:
    """The same path has one descriptor, which names the same file, above the descriptors that a server uses itself."""
    inherited = InheritedPaths()
    aliases = {inherited.make_reachable(interpreter.executable, OTHER_UID) for _ in range(3)}
    (fd,) = inherited.fds

    assert aliases == {f"/proc/self/fd/{fd}"}
    assert fd >= 200
    assert os.path.samestat(os.fstat(fd), os.stat(interpreter.executable))
    inherited.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_the_landlock_command_of_the_own_user(spec: ServerSpec) -> None:
    """It runs the interpreter itself, and its settings have plain paths and no limit of threads."""
    inherited = InheritedPaths()
    command = build_landlock_command(spec, 7, "/tmp/programs", inherited)
    settings = json.loads(command[-1])

    assert (spec.interpreter.executable, "server") == (command[0], command[-2])
    assert ("/tmp/programs", 7, False) == (settings["workspace_root"], settings["control_fd"], settings["namespaces"])
    # The kernel would count all processes of this user.
    assert (0, []) == (settings["max_threads"], settings["inherited_fds"])
    assert list(spec.interpreter.packages) == settings["import_path"]


def test_the_landlock_command_of_another_user(spec: ServerSpec) -> None:
    """Every hidden path goes by descriptor, and programs keep those that they import through."""
    inherited = InheritedPaths()
    command = build_landlock_command(evolve(spec, uid=OTHER_UID), 7, "/tmp/programs", inherited)
    outer = json.loads(command[-1])
    settings = json.loads(outer["command"][-1])
    home = inherited.make_reachable(spec.interpreter.home, OTHER_UID)

    assert ("drop_privileges", OTHER_UID, {}) == (command[-2], outer["uid"], outer["covers"])
    assert outer["command"][0].startswith("/proc/self/fd/")
    imported = {
        int(path.split("/")[4]) for path in (*settings["import_path"], home) if path.startswith("/proc/self/fd/")
    }
    assert sorted(imported) == settings["inherited_fds"]
    assert imported < set(inherited.fds)
    assert not [path for path in settings["readable"] if path.startswith(spec.interpreter.home)]
    assert settings["max_threads"] == spec.config.max_threads
    inherited.close()


def test_the_namespaces_command_of_another_user(spec: ServerSpec) -> None:
    """The closed directory is covered, and shows exactly the paths that the box binds from it."""
    other = evolve(spec, tier=Tier.NAMESPACES, uid=OTHER_UID)
    outer = json.loads(build_namespaces_command(other, 7)[-1])
    closed = os.path.dirname(spec.interpreter.home)
    shown = [path for path in find_values(outer["command"], "--ro-bind") if path.startswith(closed)]

    assert sorted(shown) == outer["covers"][closed]
    assert len(shown) == 3
    assert PACKAGE in find_values(outer["command"], "--ro-bind")
    assert outer["command"].index("/usr/bin/bwrap") < outer["command"].index(spec.interpreter.executable)


def test_options_reach_the_server(spec: ServerSpec, tmp_path) -> None:
    """`readable`, `preload` and `max_threads` of the config are in the settings of the server."""
    (tmp_path / "data").mkdir()
    config = SandboxConfig(readable=(f"{tmp_path}/data",), preload=("json",), max_threads=77)
    settings = json.loads(build_namespaces_command(evolve(spec, tier=Tier.NAMESPACES, config=config), 7)[-1])

    assert f"{tmp_path}/data" in settings["readable"]
    assert (["json"], 77, True) == (settings["preload"], settings["max_threads"], settings["namespaces"])


def test_only_root_needs_another_user(monkeypatch) -> None:
    """An ordinary user's servers keep that user."""
    monkeypatch.setattr(server_command.os, "geteuid", lambda: 1000)

    assert find_unprivileged_uid() is None


@given(st.sets(st.integers(60100, 64195), max_size=20), st.integers(1, 2**22))
def test_the_user_has_no_account(taken: set[int], pid: int) -> None:
    """For root it is a user id of the range that no account has."""

    def getpwuid(uid: int) -> object:
        if uid in taken:
            return object()
        raise KeyError(uid)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_command.os, "geteuid", lambda: 0)
        patch.setattr(server_command.os, "getpid", lambda: pid)
        patch.setattr(pwd, "getpwuid", getpwuid)
        uid = find_unprivileged_uid()

    assert uid in range(60100, 64196)
    assert uid not in taken


def test_without_a_free_user_there_is_no_sandbox(monkeypatch) -> None:
    """If every user id has an account, root gets an error that names the range."""
    monkeypatch.setattr(server_command.os, "geteuid", lambda: 0)
    monkeypatch.setattr(pwd, "getpwuid", lambda _uid: object())

    with pytest.raises(SandboxUnavailableError, match="60100 to 64195"):
        find_unprivileged_uid()
