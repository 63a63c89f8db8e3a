"""No program reaches the files or the resources of its neighbours, in any tier, as any user, with any Landlock."""

from __future__ import annotations

import contextlib
import fcntl
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from neighbour_attacks import NEIGHBOUR_ATTACKS, NeighbourAttack, build_program
from sandbox_settings import Host

_NEIGHBOUR = """
import os, time
for n in range(20):
    with open(f'f{n}', 'w') as file: file.write('mine')
    assert open(os.path.join(os.environ['HOME'], f'f{n}')).read() == 'mine'
    time.sleep(0.02)
print('well')
"""

_FORGED_REPLY = """
import os
for fd in range(3, 1024):
    try: os.write(fd, b'\\0\\0\\0\\x10{"exit_code": 0}')
    except OSError: pass
"""


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold every kind of lock on a file."""
    with path.open("r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.many_cases(8)
@pytest.mark.parametrize("attack", NEIGHBOUR_ATTACKS, ids=lambda attack: attack.name)
def test_a_neighbour_is_out_of_reach(host: Host, attack: NeighbourAttack) -> None:
    """The attack reaches nothing, the victim is unchanged, and no program beside it fails."""
    before = host.victim.describe()

    with locked(host.victim.library / "module.py"):
        attacker, *neighbours = host.run([build_program(attack, str(host.victim.path)), *[_NEIGHBOUR] * 6])

    assert "BREACH" not in attacker["stdout"], attacker["stdout"]
    assert attacker["status"] in attack.statuses, attacker
    # A mistake in the attack itself would be a traceback.
    assert "" == attacker["stderr"] or len(attack.statuses) > 1, attacker
    assert before == host.victim.describe()
    assert [("ok", "well\n")] * 6 == [(each["status"], each["stdout"]) for each in neighbours], neighbours


@pytest.mark.many_cases(2)
def test_a_call_that_runs_on_reaches_only_its_session(host: Host) -> None:
    """Code that forges its own reply early runs on beside the next call, and is stopped with it."""
    early, beside, after = host.run_session([_FORGED_REPLY + "while True: pass", "print(1)", "print(2)"], timeout_s=0.5)
    (neighbour,) = host.run_session(["print('well')"])

    assert "ok" == early["status"]
    assert beside["status"] in ("timeout", "crashed")
    assert after["status"] in ("ok", "crashed")
    assert ("ok", "well\n") == (neighbour["status"], neighbour["stdout"])


def test_the_setting_is_real(host: Host) -> None:
    """Programs are in the tier of the setting, can read the library, and own the victim's other file."""
    code = f"import os; print(open({str(host.victim.library / 'module.py')!r}).read(), os.getuid())"
    (result,) = host.run([code])
    content, uid = result["stdout"].rsplit(maxsplit=1)

    assert ("ok", host.setting.tier) == (result["status"], result["tier"]), result
    assert "content = 1" == content.strip()
    assert (host.victim.path / "data.txt").stat().st_uid == int(uid)
    assert (host.setting.user == "root") == (int(uid) >= 60100)


def test_honest_changes_of_own_files_work(host: Host) -> None:
    """Copies, touches and truncations of a program's own files work in every setting."""
    code = (
        "import os, pathlib, shutil\n"
        "open('a', 'w').write('text'); os.mkdir('d'); shutil.copy('a', 'd/b'); shutil.copy2('a', 'd/c')\n"
        "shutil.copytree('d', 'e'); pathlib.Path('new').touch(); pathlib.Path('new').touch()\n"
        "os.truncate('a', 2); print(open('a').read(), sorted(os.listdir('e')), os.path.exists('new'))"
    )
    (result,) = host.run([code])

    assert ("ok", "te ['b', 'c'] True\n", "") == (result["status"], result["stdout"], result["stderr"])


def test_the_readme_lists_every_attack_on_neighbours() -> None:
    """The README's table has exactly the attacks of this list, in this order."""
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## Attacks on neighbours")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \|", section, re.MULTILINE)

    assert [attack.name for attack in NEIGHBOUR_ATTACKS] == rows[1:]
