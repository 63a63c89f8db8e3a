"""Honest programs behave as with `python main.py`."""

# ruff: noqa: E501 - a program is one string, and a line of it may be long

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from sandbox_settings import GROWING_S

from turnwise_python_sandbox import Sandbox, Status

PROGRAMS = {
    "arithmetic": "print(sum(i * i for i in range(1000)))",
    "unicode": "print('ü→漢🎉')",
    "functions and closures": "def make(n):\n    return lambda x: x + n\nprint(make(3)(4))",
    "classes": "class A:\n    def __init__(self): self.x = 1\n    def __repr__(self): return f'A({self.x})'\nprint(A(), A.__module__)",
    "main guard": "if __name__ == '__main__':\n    print('main', __file__)",
    "names of main": "import __main__\nx = 5\nprint(__main__.x, sorted(n for n in dir() if n[0] != '_'))",
    "pickle of a class in main": "import pickle\nclass P:\n    x = 3\nprint(pickle.loads(pickle.dumps(P())).x)",
    "dataclass": "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int = 1\nprint(P(2))",
    "type hints": "import typing\nclass N: ...\ndef f(a: 'N') -> 'list[N]': ...\nprint(typing.get_type_hints(f))",
    "named tuple and enum": "from collections import namedtuple\nfrom enum import Enum\nP = namedtuple('P', 'a b')\nclass C(Enum):\n    R = 1\nprint(P(1, 2), C.R)",
    "exit functions": "import atexit\natexit.register(print, 'bye')\nprint('hello')",
    "finalizers": "class A:\n    def __del__(self): print('gone')\na = A()\nprint('end')",
    "finalizers in a cycle": "class A:\n    def __del__(self): print('gone')\na = A(); a.me = a\nprint('end')",
    "threads are waited for": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.05), print('late'))).start()\nprint('first')",
    "a pool of threads": "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as pool:\n    print(list(pool.map(lambda x: x * x, range(9))))",
    "asyncio": "import asyncio\nasync def f():\n    await asyncio.sleep(0.01)\n    return 7\nprint(asyncio.run(f()))",
    "files": "open('a.txt', 'w').write('one\\ntwo\\n')\nprint(open('a.txt').readlines())",
    "a module in its directory": "open('mine.py', 'w').write('x = 42')\nimport mine\nprint(mine.x)",
    "temporary files": "import tempfile\nwith tempfile.NamedTemporaryFile('w+') as f:\n    f.write('x'); f.seek(0); print(f.read())",
    "copies of files": "import shutil\nopen('a', 'w').write('x')\nshutil.copy2('a', 'b')\nprint(open('b').read())",
    "output without a newline": "import sys\nsys.stdout.write('abc')",
    "output replaced": "import io, sys\nout = sys.stdout\nprint('a', end='')\nsys.stdout = io.StringIO()\nprint('lost')\nsys.stdout = out\nprint('b')",
    "binary output": "import sys\nsys.stdout.buffer.write(b'raw\\n')",
    "standard library": "import csv, io, json, re, statistics, decimal, fractions, hashlib, base64, datetime\nprint(json.dumps({'a': [1, None]}), re.findall(r'\\d+', 'a1b22'), statistics.mean([1, 2]), decimal.Decimal(1) / 3, hashlib.sha256(b'').hexdigest()[:8])",
    "big numbers": "import math\nprint(math.factorial(200) % 10**9, 2**1000 % 97)",
    "recursion within reason": "import sys\nsys.setrecursionlimit(20000)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(15000))",
    "recursion that is caught": "def f(): return f()\ntry:\n    f()\nexcept RecursionError:\n    print('caught')",
    "memory that is given back": "for _ in range(20):\n    x = bytearray(50 * 2**20)\nprint(len(x))",
    "exit code": "import sys\nprint('before')\nsys.exit(3)",
    "exit with a text": "raise SystemExit('no')",
    "quiet end by SystemExit": "raise SystemExit",
    "exit code above 255": "raise SystemExit(256 + 7)",
    "negative exit code": "raise SystemExit(-1)",
    "exit with a boolean": "raise SystemExit(True)",
    "exit inside a function": "def f():\n    try:\n        raise SystemExit(4)\n    finally:\n        print('finally')\nf()",
    "exit functions in reverse order": "import atexit\nfor n in range(3): atexit.register(print, n)",
    "an exit function that raises": "import atexit\natexit.register(lambda: 1 / 0)\natexit.register(print, 'still')",
    "exit in a thread": "import threading\ndef f(): raise SystemExit(3)\nt = threading.Thread(target=f)\nt.start(); t.join()\nprint('on')",
    "a closed standard output": "import sys\nprint('a')\nsys.stdout.close()",
    "non-ASCII names and strings": "größe = 'ß'\nprint(größe.upper(), len('\\U0001f389'))",
    "an encoding declaration": "# -*- coding: utf-8 -*-\nprint('ä')",
    "carriage returns": "x = 1\r\nprint(x)\r\n",
    "an empty program": "",
    "a comment only": "# nothing",
    "a docstring of main": "'''doc'''\nprint(__doc__)",
    "annotations of main": "x: int = 1\nprint(__annotations__)",
    "a future import": "from __future__ import annotations\ndef f(a: Unknown): ...\nprint(f.__annotations__)",
    "source by inspect": "import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f))",
    "a generator left open": "def g():\n    try:\n        yield 1\n    finally:\n        print('closed')\nh = g(); next(h)",
    "standard input at its end": "import sys\nprint(repr(sys.stdin.read()))",
    "a name that shadows a module": "json = {'a': 1}\nprint(json)",
    "source with form feeds and tabs": "if 1:\n\tprint('tab')\n\f\nprint('page')",
    "what a word list would forbid": "__x__ = 1\nprint(isinstance(__x__, int), eval('1+1'), getattr(int, '__name__'))",
    "a signal handler": "import os, signal\nsignal.signal(signal.SIGUSR1, lambda *a: print('caught'))\nos.kill(os.getpid(), signal.SIGUSR1)",
    "an alarm": "import signal\nsignal.signal(signal.SIGALRM, lambda *a: print('ring'))\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\nsignal.pause()",
    "hash order": "print(list({'a', 'b', 'c', 'd'}), hash('x'))",
    "generators and comprehension": "def g():\n    yield from range(3)\nprint([x for x in g()], {k: v for k, v in zip('ab', g())})",
    "a subprocess is refused, not faked": "try:\n    import subprocess; subprocess.run(['true'])\nexcept OSError:\n    print('refused')\nelse:\n    print('refused')",
}
FAILING = {
    "exception": "def f(x):\n    return 1 / x\n\nf(0)",
    "exception with notes and causes": "try:\n    {}['k']\nexcept KeyError as error:\n    raise ValueError('outer') from error",
    "syntax": "print('a'\nx = = 1",
    "indentation": "def f():\nreturn 1",
    "exception in a thread": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='worker')\nt.start(); t.join()",
    "an exception hook": "import sys\nsys.excepthook = lambda *a: print('hooked')\n1 / 0",
    "exception group": "raise ExceptionGroup('several', [ValueError(1), TypeError(2)])",
    "a text that raises": "class E(Exception):\n    def __str__(self): return 1 / 0\nraise E",
    "memory error that is raised by hand": "try:\n    raise MemoryError('x')\nexcept MemoryError:\n    print('caught')",
}


def _plain(code: str, folder) -> subprocess.CompletedProcess[str]:
    """Run the program with a plain interpreter."""
    (folder / "main.py").write_text(code)
    environment = {"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0", "LANG": "C.UTF-8"}
    command = [sys.executable, "main.py"]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=600, env=environment, stdin=subprocess.DEVNULL
    )


@pytest.mark.many_cases
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_does_what_python_does(sandbox: Sandbox, tmp_path, name: str) -> None:
    """Output and exit code equal those of a plain interpreter."""
    expected = _plain(PROGRAMS[name], tmp_path)
    actual = sandbox.run(PROGRAMS[name])

    said = expected.stdout.replace(str(tmp_path) + "/", "")
    assert (said, expected.returncode) == (actual.stdout, actual.exit_code), actual
    assert (Status.OK if expected.returncode == 0 else Status.ERROR) == actual.status


@pytest.mark.parametrize("name", FAILING)
def test_traceback_is_what_python_prints(sandbox: Sandbox, tmp_path, name: str) -> None:
    """Tracebacks show the program's own lines, and no frame of the sandbox."""
    expected = _plain(FAILING[name], tmp_path)
    actual = sandbox.run(FAILING[name])

    assert (expected.stdout, expected.returncode) == (actual.stdout, actual.exit_code)
    if "thread" in name:
        assert "worker" in actual.stderr
        assert "1 / 0" in actual.stderr
    elif "text that raises" not in name:
        assert _lines(expected.stderr.replace(str(tmp_path) + "/", "")) == _lines(actual.stderr)


def _lines(text: str) -> list[str]:
    """Drop the lines of carets, which `traceback` draws shorter than the interpreter for a bad indentation."""
    return [line for line in text.splitlines() if set(line) > {" ", "^"} or "^" not in line]


def test_standard_input_is_read(sandbox: Sandbox) -> None:
    """`input` reads the caller's `stdin`."""
    result = sandbox.run("print(int(input()) + int(input()))", stdin="2\n40\n")

    assert (Status.OK, "42\n") == (result.status, result.stdout)


def test_output_before_a_kill_is_kept(sandbox: Sandbox) -> None:
    """The result of a timeout has the output until then."""
    runs = (sandbox.run("print('so far')\nwhile True: pass", timeout_s=timeout_s) for timeout_s in GROWING_S)
    result = next(run for run in runs if run.stdout)

    assert (Status.TIMEOUT, "so far\n", 137) == (result.status, result.stdout, result.exit_code)


def test_output_is_cut_at_the_limit(sandbox: Sandbox) -> None:
    """Output above the limit is cut exactly at the limit."""
    result = sandbox.run("while True: print('x' * 100)", max_output_bytes=5000)

    assert (Status.OUTPUT_LIMIT, 5000) == (result.status, len(result.stdout))


def test_output_at_the_limit_is_allowed(sandbox: Sandbox) -> None:
    """A program may print exactly as many bytes as its limit."""
    result = sandbox.run("print('x' * 4999)", max_output_bytes=5000)

    assert (Status.OK, 5000) == (result.status, len(result.stdout))


def test_processor_seconds_are_limited(make_sandbox) -> None:
    """The processor seconds of all threads together are limited, independently of the wall-clock limit."""
    code = "import hashlib, threading\ndef f():\n    while True: hashlib.sha256(bytes(2**20))\nfor _ in range(4): threading.Thread(target=f).start()"
    result = make_sandbox(2, cpu_s=1.0, servers=1).run(code, timeout_s=600.0)

    # The wall-clock limit would end it with SIGKILL.
    assert (Status.TIMEOUT, 128 + signal.SIGXCPU) == (result.status, result.exit_code)


def test_memory_is_per_run(sandbox: Sandbox) -> None:
    """A call can raise the memory limit for itself, and only for itself."""
    code = "x = bytearray(300 * 2**20)\nprint(len(x))"

    assert sandbox.run(code).status is Status.MEMORY
    assert sandbox.run(code, memory_mb=512).status is Status.OK
    assert sandbox.run(code).status is Status.MEMORY


def test_random_numbers_differ_between_runs(make_sandbox) -> None:
    """Programs of one warm interpreter get different random numbers."""
    box = make_sandbox(2, preload=("numpy",), servers=1)
    code = "import random, uuid\nprint(random.random(), uuid.uuid4())\nimport numpy\nprint(numpy.random.rand())"
    runs = [box.run(code).stdout.splitlines() for _ in range(3)]

    assert [3, 3] == [len({run[line] for run in runs}) for line in (0, 1)]


def test_preloaded_modules_are_there(make_sandbox) -> None:
    """Preloaded numpy and sympy compute as usual."""
    box = make_sandbox(1, preload=("numpy", "sympy"), servers=1)
    code = (
        "import sys\nprint('sympy' in sys.modules)\nimport numpy as np, sympy as sp\nx = sp.symbols('x')\n"
        "print(sp.solve(x**2 - 2, x), np.linalg.det(np.eye(200) * 2) > 0, np.arange(3).sum())"
    )
    result = box.run(code)

    assert "True\n[-sqrt(2), sqrt(2)] True 3\n" == result.stdout, result


def test_modules_that_are_not_preloaded_can_be_imported(sandbox: Sandbox) -> None:
    """Programs can import packages of the interpreter that are not preloaded."""
    result = sandbox.run("import numpy\nprint(numpy.ones(3).sum())", timeout_s=60)

    assert "3.0\n" == result.stdout, result


def test_lone_surrogates_come_through(sandbox: Sandbox) -> None:
    """Code with lone surrogates and output that is not UTF-8 do no harm."""
    result = sandbox.run("print(len('\\ud800'))\nimport os\nos.write(1, b'\\xff\\xfe')")

    assert "1\n��" == result.stdout
    assert sandbox.run("x = '\ud800'").status is Status.ERROR


@pytest.mark.slow
def test_a_thousand_runs_have_no_wrong_output(make_sandbox) -> None:
    """The outputs of 1,000 different programs, eight at a time, are all correct."""
    from concurrent.futures import ThreadPoolExecutor

    box = make_sandbox(1)
    codes = [f"import math\nprint({n}, math.factorial({n}) % 1000007)" for n in range(1000)]
    import math

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(box.run, codes))

    wrong = [r for n, r in enumerate(results) if r.stdout != f"{n} {math.factorial(n) % 1000007}\n"]
    assert wrong == []
