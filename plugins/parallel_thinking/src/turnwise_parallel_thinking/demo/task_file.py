"""The command that writes the tasks of a demo as a JSONL file, and its rows."""

# ruff: noqa: T201 - a command prints

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def build_row(question: str, answer: int, source: str, **extra_info: object) -> dict[str, Any]:
    """Return a task as a row in verl's columns; `source` is its data source."""
    return {
        "prompt": [{"role": "user", "content": question}],
        "agent_name": "parallel_thinking",
        "data_source": source,
        "reward_model": {"ground_truth": str(answer)},
        "extra_info": extra_info,
    }


def build_parser(module: str, description: str, examples: str) -> argparse.ArgumentParser:
    """Return the command line of a module of this package, with the options that every demo has."""
    parser = argparse.ArgumentParser(
        prog=f"python -m turnwise_parallel_thinking.demo.{module}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--split", choices=("train", "test"), default="train", help="which split (default: train)")
    parser.add_argument("--num", type=int, default=64, help="tasks to write (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the stream (default: 0)")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    return parser


def write_tasks(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    generate: Callable[[argparse.Namespace], list[dict[str, Any]]],
) -> None:
    """Write the rows for these arguments; a `ValueError` of `generate` is an error of the command line."""
    options = parser.parse_args(arguments)
    try:
        rows = generate(options)
    except ValueError as error:
        parser.error(str(error))
    options.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"wrote {len(rows)} {options.split} tasks to {options.out}")
