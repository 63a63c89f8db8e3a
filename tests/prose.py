"""
Counts words that make documentation hard to read, in the docstrings of source files.

    python tests/prose.py [FOLDER ...]          counts per 1,000 words of docstrings, and the share of relative openers
    python tests/prose.py --list [FOLDER ...]   every docstring line with such a word
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCES = ("core/src", "libs/*/src", "plugins/*/src")
WORDS = {
    "what": r"what",
    "nobody / somebody": r"nobody|somebody",
    "stand(s)": r"stands?",
    "go(es) on / gone on": r"(?:go|goes|gone|going|went) on",
    "begin / began / begun": r"begins?|began|begun|beginning",
    "that of / those of": r"(?:that|those) of",
    "those that": r"those that",
    "of its own": r"of (?:its|their) own(?! \w)",
}
PATTERNS = {name: re.compile(rf"\b(?:{words})\b", re.IGNORECASE) for name, words in WORDS.items()}
OPENER = re.compile(r"(?:What|Who|Whose|Where|How)\b[^?]*(?:\.|$)")
"""A sentence that opens with a relative clause; a question ends in a question mark and does not count."""


class Docstring(NamedTuple):
    """A docstring, and the file and line of its definition."""

    place: str
    text: str


class Counts(NamedTuple):
    """Counts of the docstrings of some files."""

    num_docstrings: int
    num_words: int
    openers: int
    words: dict[str, int]

    def per_thousand(self, name: str) -> float:
        """Return how often a word occurs in 1,000 words."""
        return 1000 * self.words[name] / max(self.num_words, 1)

    @property
    def opener_share(self) -> float:
        """Share of docstrings whose first sentence opens with a relative clause."""
        return self.openers / max(self.num_docstrings, 1)


def source_files(folders: Sequence[str | Path]) -> list[Path]:
    """Return the Python files of folders, which may be patterns below the repository's root."""
    roots = [
        path for folder in folders for path in ([Path(folder)] if Path(folder).exists() else ROOT.glob(str(folder)))
    ]
    return sorted({file for root in roots for file in ([root] if root.is_file() else root.rglob("*.py"))})


def docstrings(files: Sequence[Path]) -> Iterator[Docstring]:
    """Yield the docstrings of modules, classes and functions, and the texts below attributes."""
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef):
                yield from _texts(file, node.body)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _texts(file, node.body[:1])


def _texts(file: Path, body: Sequence[ast.stmt]) -> Iterator[Docstring]:
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Docstring(f"{file}:{node.lineno}", node.value.value)


def count(files: Sequence[Path]) -> Counts:
    """Count the words of `WORDS` and the relative openers in the docstrings of files."""
    found = [each.text for each in docstrings(files)]
    text = "\n".join(found)
    return Counts(
        num_docstrings=len(found),
        num_words=len(re.findall(r"[A-Za-z][A-Za-z'-]*", text)),
        openers=sum(OPENER.match(each.strip()) is not None for each in found),
        words={name: len(pattern.findall(text)) for name, pattern in PATTERNS.items()},
    )


def main(arguments: Sequence[str]) -> int:
    """Print the counts, or the lines."""
    listing = "--list" in arguments
    files = source_files([each for each in arguments if each != "--list"] or SOURCES)
    if listing:
        for each in docstrings(files):
            names = [name for name, pattern in PATTERNS.items() if pattern.search(each.text)]
            if names or OPENER.match(each.text.strip()):
                sys.stdout.write(f"{each.place}: {', '.join(names) or 'opener'}\n")
        return 0
    counts = count(files)
    sys.stdout.write(f"{counts.num_docstrings} docstrings, {counts.num_words} words\n")
    sys.stdout.write(f"opening with What/Who/Whose/Where/How: {100 * counts.opener_share:.2f} %\n")
    for name in WORDS:
        sys.stdout.write(f"{name}: {counts.per_thousand(name):.2f} per 1,000 words\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
