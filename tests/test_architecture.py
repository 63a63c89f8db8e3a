"""Limits on imports, on the size of files and functions, and on risky code."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from turnwise.plugin.host import KINDS

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core/src/turnwise"
PLUGINS = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))
MODULES = [f"turnwise_{name}" for name in PLUGINS]
LIBRARIES = [
    "turnwise_chat_templates",
    "turnwise_engine_support",
    "turnwise_moe_routes",
    "turnwise_result_files",
    "turnwise_rollout_buffer",
    "turnwise_strict_json",
    "turnwise_task_files",
    "turnwise_tool_formats",
]
"""Packages under `libs/` that plugins build on; the other libraries know nothing of turnwise."""
SOURCES = sorted(
    path
    for pattern in (
        "core/src/**/*.py",
        "libs/*/src/**/*.py",
        "plugins/*/src/**/*.py",
        "benchmarks/**/*.py",
        "docs/*.py",
    )
    for path in ROOT.glob(pattern)
)
TESTS = sorted(
    path
    for pattern in ("core/tests/**/*.py", "libs/*/tests/**/*.py", "plugins/*/tests/**/*.py", "tests/*.py")
    for path in ROOT.glob(pattern)
)
HEAVY = ("ray", "safetensors", "sglang", "tokenizers", "torch", "transformers", "vllm")
PUBLIC = (
    "batch",
    "collector",
    "config",
    "console",
    "descriptors",
    "errors",
    "events",
    "files",
    "layout",
    "media",
    "messages",
    "models",
    "naming",
    "options",
    "plugin",
    "protocols",
    "record",
    "report",
    "sampling",
    "showing",
    "sized_cache",
    "task_tools",
    "terminal",
    "threads",
    "types",
    "weights",
)
"""Modules of the core that plugins may import."""

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
FORBIDDEN_NAMES = {"base", "common", "helper", "helpers", "misc", "util", "utils"}

RISKY_CALLS = {"eval", "exec", "os.system", "torch.load", "yaml.load", "yaml.load_all", "yaml.unsafe_load"}
RISKY_MODULES = {"cloudpickle", "dill", "marshal", "pickle", "shelve"}
ALLOWED = {
    ("core/src/turnwise/config/file.py", "yaml.load"): "its loader is a SafeLoader that refuses still more",
    ("plugins/python_sandbox/src/turnwise_python_sandbox/box/program.py", "exec"): "runs programs, inside the box",
    ("libs/testing/src/turnwise_testing/engines/actor_run.py", "pickle"): "reads a job from its parent process",
    ("libs/testing/src/turnwise_testing/checks/column.py", "pickle"): "checks that columns survive pickling",
    ("libs/testing/src/turnwise_testing/suites/engine.py", "pickle"): "writes that job",
    ("libs/testing/src/turnwise_testing/suites/plugin.py", "pickle"): "checks that configs survive pickling",
    ("libs/testing/src/turnwise_testing/suites/wrapper.py", "pickle"): "checks that sections survive pickling",
    ("libs/testing/src/turnwise_testing/simulation/simulated_ray.py", "pickle"): "copies arguments within a simulation",
    ("core/src/turnwise/runtime/remote/channel.py", "pickle"): "reads messages of a peer that has proved its key",
    ("core/src/turnwise/runtime/remote/picture_packets.py", "pickle"): "reads arguments and replies of Ray's calls",
    ("plugins/sglang_engine/src/turnwise_sglang_engine/loading.py", "pickle"): "writes tensors as SGLang reads them",
}
"""Risky uses that are allowed, each with the reason; an unused entry fails the test."""


ENGINES_AND_TRAINERS = ("GRPO", "SGLang", "grpo", "openai", "sglang", "trl", "vLLM", "verl", "vllm")
OTHER_PARTS = ("calculator", "hermes", "mlflow", "otel", "prometheus", "torl", "trace_file", "wandb")
"""Names of parts and libraries of our plugins. `OpenAI`, with capitals, is a format of messages and schemas."""
_PEERS = "core/src/turnwise/config/peer_keys.py"
CORE_MAY_NAME: dict[tuple[str, str], str] = {
    (_PEERS, "grpo"): "a value of TRL's loss_type",
    (_PEERS, "single_turn"): "an agent, in the note of a key",
    (_PEERS, "tool_agent"): "an agent, in the note of a key",
    (_PEERS, "verl"): "a framework whose keys errors recognise",
    (_PEERS, "vllm"): "the start of keys of TRL, and an engine in the note of a key",
    ("core/src/turnwise/runtime/tools.py", "verl"): "the tools that read a file with class_name, which verl defined",
}
"""Names that are allowed in strings of the core, each with the reason; an unused entry fails the test."""


SLOW_LIBRARIES = ("anthropic", "datasets", "mcp", "mlflow", "openai", "peft", "trl", "wandb")
"""Libraries whose import takes a large part of a second or more of the processor."""


def name_of(path: Path) -> str:
    """Return a path as texts show it."""
    return path.relative_to(ROOT).as_posix()


def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), name_of(path))


def containing(paths: Iterable[Path], words: str) -> Iterator[Path]:
    """Yield the files whose text has one of some words, a regular expression: parsing takes a hundred times as long."""
    found = re.compile(rf"\b(?:{words})\b")
    return (path for path in paths if found.search(path.read_text(encoding="utf-8")))


def contracts() -> dict[str, dict[str, list[str]]]:
    """Return the import contracts by name."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    return {contract["name"]: contract for contract in settings["contracts"]} | {"": settings}


def test_import_contracts_are_kept() -> None:
    """`lint-imports` finds no broken contract of layers, independent plugins or heavy packages."""
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


def test_every_plugin_is_in_the_contracts() -> None:
    """Every plugin folder is named in the import contracts."""
    found = contracts()

    assert ["turnwise", *LIBRARIES, *MODULES] == found[""]["root_packages"]
    assert found["the core imports no shared library"]["forbidden_modules"] == LIBRARIES
    assert found["shared libraries import no plugin"]["source_modules"] == LIBRARIES
    assert found["shared libraries import no plugin"]["forbidden_modules"] == MODULES
    assert found["the core imports no plugin"]["forbidden_modules"] == MODULES
    assert found["no plugin imports another"]["modules"] == MODULES


def names_in_strings(tree: ast.Module) -> Iterator[str]:
    """Yield the names of our plugins and of their parts in the strings of a module, its docstrings included."""
    # The name of a plugin that is also a kind of part, such as weight_transports, is a word of the core.
    folders = [name for name in PLUGINS if name not in KINDS]
    names = {*folders, *(name.replace("_", "-") for name in folders), *ENGINES_AND_TRAINERS, *OTHER_PARTS}
    longest_first = sorted(names, key=len, reverse=True)
    pattern = re.compile(rf"(?<![A-Za-z])(?:{'|'.join(map(re.escape, longest_first))})(?![A-Za-z])")
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from pattern.findall(node.value)


def test_the_core_names_no_plugin() -> None:
    """No string of the core has the name of a plugin or of its parts: a plugin of a stranger is treated as ours."""
    found = {(name_of(path), name) for path in CORE.rglob("*.py") for name in names_in_strings(parsed(path))}

    assert found == set(CORE_MAY_NAME)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("x = 'vllm'", ["vllm"]),
        ("x = f'pip install turnwise-vllm-engine[{y}]'", ["vllm-engine"]),
        ('"""A GRPO group."""', ["GRPO"]),
        ("x = {'otel': 1}", ["otel"]),
        ("vllm = overloaded('overlap')", []),
        ("x = 'the OpenAI form'", []),
        ("x = 'weight_transports'", []),
    ],
)
def test_names_are_found(code: str, expected: list[str]) -> None:
    """The search finds names in plain strings, f-strings and docstrings, and no part of another word."""
    assert expected == list(names_in_strings(ast.parse(code)))


def test_other_modules_are_protected() -> None:
    """Every module of the core is listed as public or as protected."""
    protected = contracts()["plugins use the public API only"]["protected_modules"]
    modules = {path.stem for path in CORE.glob("*.py")} | {path.name for path in CORE.iterdir() if path.is_dir()}

    expected = sorted(f"turnwise.{name}" for name in modules - {"__init__", "__pycache__", *PUBLIC})
    assert expected == protected


def test_files_are_short() -> None:
    """No file has more lines than the limit."""
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}

    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def long_functions(path: Path) -> Iterator[str]:
    """Yield the functions of a file that are too long, with their lengths."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield f"{name_of(path)}:{node.lineno} {node.name} has {num_lines} lines"


def test_functions_are_short() -> None:
    """No function is longer than a screen, its docstring included."""
    assert [found for path in SOURCES for found in long_functions(path)] == []


def test_module_names_are_specific() -> None:
    """No module has a name such as `utils`, which would hold anything."""
    assert [name_of(path) for path in SOURCES if FORBIDDEN_NAMES & {path.stem, path.parent.stem}] == []


def test_imports_are_light() -> None:
    """`import turnwise` and the modules of entry points load no engine, no tensor library and no tokenizer."""
    code = (
        "import importlib, json, sys\n"
        "found = {}\n"
        "for name in sys.argv[1].split(','):\n"
        "    importlib.import_module(name)\n"
        f"    found[name] = [heavy for heavy in {HEAVY!r} if sys.modules.pop(heavy, None)]\n"
        "print(json.dumps(found))\n"
    )
    names = ["turnwise", "turnwise.builtins", "turnwise.plugin.host", "turnwise.runtime.manager", *MODULES]
    done = subprocess.run([sys.executable, "-c", code, ",".join(names)], capture_output=True, text=True, check=True)

    assert json.loads(done.stdout) == {name: [] for name in names}


def test_tests_import_slow_libraries_in_functions() -> None:
    """Each process of `make test` imports all test files, and few tests need a library of this list."""
    files = (path for path in TESTS if path.name.startswith("test_") or path.name == "conftest.py")
    files = containing(files, rf"(?:import|from) (?:{'|'.join(SLOW_LIBRARIES)})")
    assert [name_of(path) for path in files if imported_at_once(path) & {*SLOW_LIBRARIES}] == []


def test_modules_that_tests_import_have_unique_names() -> None:
    """Tests import each other's modules by their plain names, and the first folder with a file of the name has it."""
    places = Counter(path.stem for path in TESTS)
    ambiguous = {stem for stem, number in places.items() if number > 1}
    paths = containing(TESTS, "|".join(ambiguous))
    assert [name_of(path) for path in paths if imported_at_once(path) & ambiguous] == []


def imported_at_once(path: Path) -> set[str]:
    """Return the packages that a module imports outside its functions."""
    found = [node for node in parsed(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [
        node.module or "" if isinstance(node, ast.ImportFrom) else alias.name for node in found for alias in node.names
    ]
    return {name.partition(".")[0] for name in names}


def dotted(node: ast.expr) -> str:
    """Return `a.b` for such an expression, and nothing for any other."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def risks(tree: ast.Module) -> Iterator[str]:
    """Yield the risky calls and imports of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in RISKY_MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in RISKY_MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call) and dotted(node.func) in RISKY_CALLS and not loads_weights_only(node):
            yield dotted(node.func)


def loads_weights_only(call: ast.Call) -> bool:
    """Return whether a call is a `torch.load` that refuses pickled objects."""
    values = [keyword.value for keyword in call.keywords if keyword.arg == "weights_only"]
    return dotted(call.func) == "torch.load" and any(isinstance(v, ast.Constant) and v.value is True for v in values)


def test_nothing_runs_data_as_code() -> None:
    """No source unpickles, evaluates text or loads YAML with a loader that makes objects, except for allowed uses."""
    paths = containing(SOURCES, "|".join(map(re.escape, (*RISKY_CALLS, *RISKY_MODULES))))
    found = {(name_of(path), risk) for path in paths for risk in risks(parsed(path))}

    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import pickle", ["pickle"]),
        ("from pickle import loads", ["pickle"]),
        ("torch.load(f)", ["torch.load"]),
        ("torch.load(f, weights_only=False)", ["torch.load"]),
        ("torch.load(f, weights_only=True)", []),
        ("yaml.load(text, Loader=yaml.Loader)", ["yaml.load"]),
        ("eval('1')", ["eval"]),
        ("model.eval()", []),
        ("yaml.safe_load(text)", []),
    ],
)
def test_risks_are_seen(code: str, expected: list[str]) -> None:
    """The search finds every risky use, and ignores a model's `eval`."""
    assert expected == list(risks(ast.parse(code)))


def collected(nodes: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the tests among statements, those in test classes included."""
    for node in nodes:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from collected(node.body)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node


def undocumented(path: Path) -> Iterator[str]:
    """Yield the tests of a file that have no docstring; a file is parsed if a test is not followed by one at once."""
    text = path.read_text(encoding="utf-8")
    if len(re.findall(r"\bdef test_", text)) == len(re.findall(r'\bdef test_\w+\([^)]*\)[^:\n]*:\n\s+"""', text)):
        return
    for node in collected(parsed(path).body):
        if ast.get_docstring(node) is None:
            yield f"{name_of(path)}:{node.lineno} {node.name}"


def test_every_test_has_a_docstring() -> None:
    """Every test has a docstring, which tells the reader of a failure the broken promise."""
    assert [found for path in TESTS for found in undocumented(path)] == []
