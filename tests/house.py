"""
Measures of the source tree: lines, the share of comments and of `Any`, and the entries of each folder.

    python tests/house.py [ROOT]     one line for each distribution of a checkout, and the longest folders
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

from attrs import define

ROOT = Path(__file__).parents[1]
MAX_ENTRIES = 14
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@define
class Measures:
    """Counts of the modules of a distribution; `code` is without comments, docstrings and blank lines."""

    files: int = 0
    lines: int = 0
    code: int = 0
    comments: int = 0
    num_any: int = 0

    def add(self, text: str) -> None:
        """Count a module."""
        tree = ast.parse(text)
        docstrings = {
            line
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        coded = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                self.comments += not token.string.startswith(("# ruff", "# noqa", "# type"))
            elif token.type not in (
                tokenize.NL,
                tokenize.NEWLINE,
                tokenize.INDENT,
                tokenize.DEDENT,
                tokenize.ENDMARKER,
            ):
                coded |= set(range(token.start[0], token.end[0] + 1))
        self.files += 1
        self.lines += text.count("\n")
        self.code += len(coded - docstrings)
        self.num_any += sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree))

    def row(self, name: str) -> str:
        """Return the counts as a line."""
        share, rate = 100 * self.comments / max(1, self.lines), 1000 * self.num_any / max(1, self.lines)
        return f"{name:28}{self.files:6}{self.lines:8}{self.code:8}{share:9.1f} %{rate:8.1f}"


def packages(root: Path) -> dict[str, Path]:
    """Return the source folder of each distribution by its name."""
    found = [root / "core/src", *sorted(root.glob("libs/*/src")), *sorted(root.glob("plugins/*/src"))]
    return {folder.parent.name: folder for folder in found}


def long_folders(root: Path) -> dict[str, int]:
    """Return the folders of sources with more than `MAX_ENTRIES` entries, without caches."""
    counts = {}
    for folder in packages(root).values():
        for path in (folder, *folder.rglob("*")):
            if path.is_dir() and path.suffix != ".egg-info" and path.name != "__pycache__":
                num = sum(each.name not in ("__pycache__", "__init__.py", "py.typed") for each in path.iterdir())
                if num > MAX_ENTRIES:
                    counts[path.relative_to(root).as_posix()] = num
    return counts


def main(root: Path) -> None:
    """Print the measures of a checkout."""
    total = Measures()
    sys.stdout.write(f"{'distribution':28}{'files':>6}{'lines':>8}{'code':>8}{'comments':>11}{'Any/kL':>8}\n")
    for name, folder in packages(root).items():
        own = Measures()
        for file in sorted(folder.rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            own.add(text)
            total.add(text)
        sys.stdout.write(own.row(name) + "\n")
    sys.stdout.write(total.row("all") + "\n")
    for name, num in sorted(long_folders(root).items(), key=lambda item: -item[1]):
        sys.stdout.write(f"{num:4} entries in {name}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
