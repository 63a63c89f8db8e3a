"""The leaderboard's own code, out of its wheel, for comparisons; nothing of it is installed."""

from __future__ import annotations

import importlib
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

PACKAGE = "bfcl_eval"
_PARSERS = "model_handler.parser"


@contextmanager
def importable(wheel: Path, folder: Path) -> Iterator[None]:
    """
    Make the wheel's package importable.

    Its table of models imports the clients of all of them, so a module with one model takes its place.
    """
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    models = ModuleType(f"{PACKAGE}.constants.model_config")
    models.MODEL_CONFIG_MAPPING = defaultdict(lambda: SimpleNamespace(underscore_to_dot=False))
    sys.path.insert(0, str(folder))
    sys.modules[models.__name__] = models
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [each for each in sys.modules if each.split(".")[0] == PACKAGE]:
            del sys.modules[name]


def load_checker():
    """Return a function that checks calls: functions, calls, answers and category to true or false."""
    module = importlib.import_module(f"{PACKAGE}.eval_checker.ast_eval.ast_checker")
    language = importlib.import_module(f"{PACKAGE}.constants.enums").Language.PYTHON

    def check(functions, calls, answers, category):
        return module.ast_checker(functions, calls, answers, language, category, "model")["valid"]

    return check


def load_tools():
    """Return a function that turns a function of the leaderboard into the one of a tool, as its prompts show it."""
    for name in (
        "tenacity",
        *(f"{PACKAGE}.{each}" for each in ("utils", f"{_PARSERS}.java_parser", f"{_PARSERS}.js_parser")),
    ):
        sys.modules[name] = _Anything(name)
    try:
        utils = importlib.import_module(f"{PACKAGE}.model_handler.utils")
    finally:
        del sys.modules["tenacity"]
    types = importlib.import_module(f"{PACKAGE}.constants.type_mappings").GORILLA_TO_OPENAPI
    style = importlib.import_module(f"{PACKAGE}.constants.enums").ModelStyle.FIREWORK_AI  # it keeps dots in names
    hint = " Note that the provided function is in Python 3 syntax."

    def translate(function):
        described = {**function, "description": function["description"] + hint}
        return utils.convert_to_tool([described], types, style)[0]["function"]

    return translate


class _Anything(ModuleType):
    """A module of which every name can be imported; its callers run no code of it here."""

    __all__ = ()

    def __getattr__(self, name):
        return lambda *_arguments, **_options: None
