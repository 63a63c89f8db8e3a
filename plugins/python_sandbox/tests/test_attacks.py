"""Every attack is contained and leaves nothing behind."""

# ruff: noqa: E501 - an attack is one string, and a line of it may be long

from __future__ import annotations

import re
from pathlib import Path

import pytest
from attrs import frozen
from sandbox_settings import Host

from turnwise_python_sandbox import Sandbox, Status

_LIMIT_S = 1.5
_SECRET = "secret" + "-of-another-run"


@frozen
class Attack:
    """
    One hostile program.

    Attributes:
        name: its row in the README's table.
        code: the program; it prints "BREACH" if the attack succeeds.
        statuses: the correct statuses.
    """

    name: str
    code: str
    statuses: tuple[str, ...]


_TRY = """
def attempt(action):
    try:
        value = action()
    except (OSError, ValueError, AttributeError, ImportError) as error:
        print("refused:", error)
    else:
        print("BREACH", value)
"""

ATTACKS = (
    Attack("endless loop", "while True: pass", ("timeout",)),
    Attack("endless sleep", "import time; time.sleep(1000)", ("timeout",)),
    Attack("big power", "x = 9 ** 9 ** 9", ("timeout",)),
    Attack("catastrophic regex", "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')", ("timeout",)),
    Attack(
        "signals ignored",
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "while True: pass",
        ("timeout",),
    ),
    Attack(
        "signals blocked",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
        ("timeout",),
    ),
    Attack("stops itself", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", ("timeout",)),
    Attack(
        "16 spinning threads",
        "import threading\ndef spin():\n    while True: pass\nfor _ in range(16): threading.Thread(target=spin).start()",
        ("timeout",),
    ),
    Attack(
        "thread bomb",
        "import threading, time\nthreading.stack_size(65536)\nwhile True:\n"
        "    try: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n    except RuntimeError: pass",
        ("timeout", "memory", "error"),
    ),
    Attack(
        "exception swallower",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        ("timeout",),
    ),
    Attack(
        "endless exit function",
        "import atexit\n@atexit.register\ndef f():\n    while True: pass",
        ("timeout",),
    ),
    Attack(
        "fork bomb",
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError as error:\n        print(error); break",
        ("ok",),
    ),
    Attack(
        "fork and vfork and clone by number",
        _TRY + "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "numbers = {'x86_64': (57, 58), 'aarch64': ()}[os.uname().machine]\n"
        "def call(*a):\n    r = libc.syscall(*a)\n    if r < 0: raise OSError(ctypes.get_errno(), 'no')\n    return r\n"
        "for n in numbers: attempt(lambda: call(n))\n"
        "attempt(lambda: call(56 if numbers else 220, 17, 0, 0, 0, 0))\nattempt(lambda: call(435, 0, 0))",
        ("ok",),
    ),
    Attack(
        "programs started",
        _TRY + "import os, subprocess\nattempt(lambda: subprocess.run(['/bin/sh', '-c', 'true']))\n"
        "attempt(lambda: os.posix_spawn('/bin/true', ['true'], {}))\nattempt(lambda: os.execv('/bin/true', ['true']))\n"
        "print('BREACH' if os.system('true') == 0 else 'refused')",
        ("ok",),
    ),
    Attack(
        "daemonised grandchild",
        "import os, time\ntry:\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n            time.sleep(1000)\n"
        "        os._exit(0)\nexcept OSError as error:\n    print(error)",
        ("ok",),
    ),
    Attack("memory bomb", "x = []\nwhile True: x.append(bytearray(10**7))", ("memory",)),
    Attack("memory at once", "x = bytearray(10**11)", ("memory",)),
    Attack("many permutations", "import itertools; list(itertools.permutations(range(11)))", ("memory", "timeout")),
    Attack(
        "memory outside the address space",
        _TRY + "import ctypes, os, mmap\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def call(*a):\n    r = libc.syscall(*a)\n    if r < 0: raise OSError(ctypes.get_errno(), 'no')\n    return r\n"
        "attempt(lambda: os.memfd_create('x'))\n"
        "shmget = 29 if os.uname().machine == 'x86_64' else 194\n"
        "attempt(lambda: call(shmget, 0, 1 << 30, 0o1600))\nattempt(lambda: open('/dev/shm/x', 'wb'))",
        ("ok",),
    ),
    Attack("10 GB of output", "block = 'x' * 10**6\nfor _ in range(10**4): print(block)", ("output_limit",)),
    Attack(
        "10 GB of errors",
        "import os\nblock = b'x' * 10**6\nfor _ in range(10**4): os.write(2, block)",
        ("output_limit",),
    ),
    Attack(
        "disk fill in one file",
        "with open('f', 'wb') as f:\n    while True: f.write(b'x' * 10**6)",
        ("disk_limit",),
    ),
    Attack(
        "disk fill in many files",
        "n = 0\nwhile True:\n    open(f'f{n}', 'wb').write(b'x' * 10**6)\n    n += 1",
        ("disk_limit",),
    ),
    Attack(
        "many empty files", "n = 0\nwhile True:\n    open(f'f{n}', 'w').close()\n    n += 1", ("disk_limit", "error")
    ),
    Attack(
        "disk fill by deleted files",
        "import os\nheld = []\nwhile True:\n    f = open('f', 'wb'); os.unlink('f'); held.append(f)\n"
        "    f.write(b'x' * 10**7); f.flush()",
        # The space is free again when the program is dead, before it can be measured.
        ("disk_limit", "error"),
    ),
    Attack(
        "a deep tree of closed directories",
        "import os\nfor n in range(900):\n    os.mkdir('d'); os.chdir('d')\nopen('x', 'w').close()\nos.chmod('.', 0)\n"
        "os.chmod('..', 0)",
        ("disk_limit",),
    ),
    Attack(
        "disk fill below a long path",
        "import os\nfor n in range(25):\n    os.mkdir('d' * 200); os.chdir('d' * 200)\nn = 0\nwhile True:\n"
        "    open(f'f{n}', 'wb').write(b'x' * 10**6)\n    n += 1",
        ("disk_limit",),
    ),
    Attack(
        "disk fill in a closed directory",
        "import os\nos.mkdir('d')\nn = 0\nwhile True:\n    os.chmod('d', 0o700)\n    open(f'd/f{n}', 'wb').write(b'x' * 10**6)\n"
        "    os.chmod('d', 0); n += 1",
        # In tier 2 a mode changes by descriptor, and a closed directory cannot be opened.
        ("disk_limit", "error"),
    ),
    Attack(
        "disk fill in moving directories",
        "import os, threading\nos.mkdir('a')\nos.mkdir('a/in')\nfd = os.open('a/in', os.O_RDONLY)\ndef move():\n    while True:\n"
        "        os.rename('a', 'b'); os.rename('b', 'a')\nthreading.Thread(target=move, daemon=True).start()\nn = 0\nwhile True:\n"
        "    f = os.open(f'f{n}', os.O_CREAT | os.O_WRONLY, dir_fd=fd); os.write(f, b'x' * 10**6); os.close(f); n += 1",
        ("disk_limit", "timeout"),
    ),
    Attack(
        "sockets",
        _TRY + "import socket\nfor family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK, "
        "socket.AF_PACKET, 40):\n    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):\n"
        "        attempt(lambda: socket.socket(family, kind))\n"
        "attempt(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))",
        ("ok",),
    ),
    Attack(
        "files of the host",
        _TRY
        + "import os\nfor path in ('/etc/passwd', '/etc/shadow', '/root/.bashrc', '/etc/hostname', '/proc/version', "
        "'/sys/kernel/notes', '/dev/vda', '/dev/mem'):\n    attempt(lambda: open(path, 'rb').read(9))\n"
        "for path in ('/', '/etc', '/root', '/home', '/proc', '/sys', '/var', '/work', '/tmp/..'):\n"
        "    names = None\n    try: names = os.listdir(path)\n    except OSError: pass\n"
        "    print('BREACH' if names else 'refused', path, names)",
        ("ok",),
    ),
    Attack(
        "symbolic links",
        _TRY + "import os\nos.symlink('/etc/passwd', 'l'); attempt(lambda: open('l').read())\n"
        "os.symlink('/', 'd'); attempt(lambda: open('d/etc/passwd').read())\n"
        "attempt(lambda: os.link('/etc/passwd', 'h') or open('h').read())\n"
        "attempt(lambda: open('../' * 30 + 'etc/passwd').read())",
        ("ok",),
    ),
    Attack(
        "tricks with /proc",
        _TRY
        + "import os\nfor path in ('self/environ', 'self/mem', 'self/maps', '1/environ', '1/cmdline', 'self/root/etc/passwd', "
        "'self/cwd/../../etc/passwd', 'sys/kernel/core_pattern', 'thread-self/attr/current'):\n"
        "    attempt(lambda: open('/proc/' + path, 'rb').read(1))\n"
        "for fd in range(3, 300):\n    for name in ('etc/passwd', '../etc/passwd', '../../../../../../etc/passwd'):\n"
        "        try: os.read(os.open(name, os.O_RDONLY, dir_fd=fd), 9); print('BREACH', fd, name)\n        except OSError: pass",
        ("ok",),
    ),
    Attack(
        "other processes' environment",
        "import os\nfor pid in [os.getppid(), *range(1, 3000)]:\n    for name in ('environ', 'cmdline', 'mem', 'fd'):\n"
        "        try:\n            path = f'/proc/{pid}/{name}'\n            print('BREACH', os.listdir(path) if name == 'fd' else open(path, 'rb').read())\n"
        "        except OSError: pass",
        ("ok",),
    ),
    Attack(
        "signals to every process",
        _TRY + "import os, signal\nfor pid in (os.getppid(), 1, 0, -1, os.getpid() - 1, os.getpid() - 2):\n"
        "    attempt(lambda: os.kill(pid, signal.SIGKILL))\nattempt(lambda: os.killpg(0, signal.SIGKILL))",
        ("ok",),
    ),
    Attack(
        "signals by fcntl and pidfd",
        _TRY + "import fcntl, os, signal\nr, w = os.pipe()\nattempt(lambda: fcntl.fcntl(r, 8, os.getppid() or 1))\n"
        "attempt(lambda: fcntl.fcntl(r, 10, signal.SIGKILL))\nattempt(lambda: signal.pidfd_send_signal(os.pidfd_open(1), 9))",
        ("ok",),
    ),
    Attack(
        "system calls by number",
        _TRY
        + "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nbuffer = ctypes.create_string_buffer(4096)\n"
        "def call(*a):\n    r = libc.syscall(*map(ctypes.c_long, a))\n    if r < 0: raise OSError(ctypes.get_errno(), 'no')\n    return r\n"
        "x86 = {'ptrace': 101, 'mount': 165, 'umount2': 166, 'pivot_root': 155, 'chroot': 161, 'unshare': 272, 'setns': 308, "
        "'bpf': 321, 'perf_event_open': 298, 'keyctl': 250, 'add_key': 248, 'userfaultfd': 323, 'io_uring_setup': 425, "
        "'process_vm_readv': 310, 'process_vm_writev': 311, 'open_by_handle_at': 304, 'name_to_handle_at': 303, "
        "'kexec_load': 246, 'init_module': 175, 'reboot': 169, 'personality': 135, 'modify_ldt': 154, 'mq_open': 240, "
        "'semget': 64, 'msgget': 68, 'inotify_init': 253, 'fanotify_init': 300, 'splice': 275, 'setuid': 105, 'capset': 126, "
        "'pidfd_open': 434, 'pidfd_getfd': 438, 'clone3': 435, 'seccomp': 317, 'socket': 41, 'connect': 42, 'x32 getpid': 0x40000000 + 39}\n"
        "for name, number in (x86 if os.uname().machine == 'x86_64' else {}).items():\n"
        "    attempt(lambda: call(number, 0, ctypes.addressof(buffer), 0, 0, 0))",
        ("ok",),
    ),
    Attack(
        "limits raised",
        _TRY
        + "import resource\nfor kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):\n"
        "    attempt(lambda: resource.setrlimit(kind, (resource.RLIM_INFINITY,) * 2))\n"
        "attempt(lambda: resource.prlimit(1, resource.RLIMIT_CPU))",
        ("ok",),
    ),
    Attack(
        "writing outside",
        _TRY
        + "import os, sys\nfor path in ('/evil', '/usr/lib/evil', '/dev/shm/evil', '/var/tmp/evil', '/dev/evil', os.__file__, "
        "sys.executable):\n    attempt(lambda: open(path, 'ab'))\n"
        "attempt(lambda: os.mkdir('/evil'))\nattempt(lambda: os.rename('/usr/lib', '/usr/bil'))\n"
        "attempt(lambda: os.mknod('dev', 0o20666, 0x801))",
        ("ok",),
    ),
    Attack("deep recursion", "def f(n): return f(n + 1)\nf(0)", ("error",)),
    Attack(
        "deep recursion without a limit",
        "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n    def __repr__(self): return repr(self)\nrepr(A())",
        ("crashed", "memory", "error"),
    ),
    Attack("segmentation fault", "import ctypes; ctypes.string_at(0)", ("crashed",)),
    Attack("abort", "import os; os.abort()", ("crashed",)),
    Attack("os._exit with success", "import os; print('partial', flush=True); os._exit(0)", ("ok",)),
    Attack("os._exit with failure", "import os; os._exit(77)", ("error",)),
    Attack("kills itself", "import os; os.kill(os.getpid(), 9)", ("crashed",)),
    Attack(
        "closed streams",
        "import os\nfor fd in range(300):\n    try: os.close(fd)\n    except OSError: pass",
        ("ok", "error"),
    ),
    Attack(
        "junk on every descriptor",
        'import os\nfor fd in range(3, 1024):\n    try: os.write(fd, b\'["Exited",1,0,"",false,0,0,0,""]\' * 99); print(\'BREACH\', fd)\n'
        "    except OSError: pass\nos.write(1, bytes(range(256)))",
        ("ok",),
    ),
    Attack(
        "forged verdict",
        "import json, os\nprint(json.dumps({'status': 'ok', 'exit_code': 0}))\nos.write(2, b'[\"Exited\", 1, 0]')\nraise SystemExit(5)",
        ("error",),
    ),
    Attack(
        "other runs in its memory",
        "import gc, sys\nneedle = 'secret' + '-of-another-run'\nfound = [o for o in gc.get_objects() if isinstance(o, (dict, list)) and needle in str(o)[:10000]]\n"
        "frame = sys._getframe()\nwhile frame:\n    if needle in str(frame.f_locals.keys()): print('BREACH')\n    frame = frame.f_back\n"
        "print('done')",
        ("ok",),
    ),
)


@pytest.mark.many_cases
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_attack_is_contained(sandbox: Sandbox, programs_of, wait_until, attack: Attack) -> None:
    """The status is correct, the attack reaches nothing and leaves nothing, and the next program runs."""
    sandbox.run(f"secret = {_SECRET!r}")

    # A program that must end for another reason gets the time that this takes on a busy machine.
    result = sandbox.run(attack.code, timeout_s=_LIMIT_S if "timeout" in attack.statuses else 60.0)

    assert "BREACH" not in result.stdout, result.stdout
    assert result.status.value in attack.statuses, result
    # A child of the server removes the files, after the result.
    wait_until(lambda: programs_of(sandbox) == set())
    after = sandbox.run("print('well')")
    assert (Status.OK, "well\n") == (after.status, after.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_attack_is_contained_in_every_setting(host: Host, attack: Attack) -> None:
    """As root and as an ordinary user, with each Landlock: the attack reaches nothing, and the next program runs."""
    before = host.victim.describe()
    host.run([f"secret = {_SECRET!r}"])

    (result,) = host.run([attack.code], timeout_s=_LIMIT_S if "timeout" in attack.statuses else 60.0)
    (after,) = host.run(["print('well')"])

    assert "BREACH" not in result["stdout"], result["stdout"]
    assert result["status"] in attack.statuses, result
    assert before == host.victim.describe()
    assert ("ok", "well\n") == (after["status"], after["stdout"])


def test_the_readme_lists_every_attack() -> None:
    """The README's table has exactly the attacks of this file, in this order."""
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \|", readme.partition("## Attacks")[2].partition("## ")[0], re.MULTILINE)

    assert [attack.name for attack in ATTACKS] == rows[1:]
