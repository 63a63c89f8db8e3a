"""
The work of both programs of `structured_training.py`: they lease tasks, ask for one operation at a time, and score.

It needs nothing but the standard library, because each program runs in the environment of its library.
"""

import json
import os
import re
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

NUM_THREADS = 16
"""Episodes that run at once."""
OPERATION = re.compile(r"(\d+) ([-+*]) (\d+)")
SPAN = re.compile(r"\d[\d +*()-]*|\(\d[\d +*()-]*")
Ask = Callable[[dict[str, Any], str, Counter[str]], Callable[[str, list[str]], str]]
"""
Gets the session of a lease, the question and the counts of the episode; returns a function of the expression so far and
the earlier results, which asks the model for an operation. It counts `replies`, `valid` ones and `retries`, and raises
`ValueError` when the last retry is invalid too.
"""


def compute(operation: str) -> int:
    """Return the value of two numbers and an operator; `ValueError` for any other text."""
    found = OPERATION.fullmatch(operation)
    if found is None:
        raise ValueError("only one operation per call")
    left, right = int(found[1]), int(found[3])
    return {"+": left + right, "-": left - right, "*": left * right}[found[2]]


def reduce(expression: str, operation: str) -> str:
    """Return an expression with the value of one of its operations in its place; `ValueError` if it has none such."""
    value = str(compute(operation))
    place = re.search(rf"\({re.escape(operation)}\)|(?<!\d){re.escape(operation)}(?!\d)", expression)
    if place is None:
        raise ValueError("the expression has no such operation")
    return expression[: place.start()] + value + expression[place.end() :]


def solve_steps(expression: str) -> list[tuple[str, str]]:
    """Return each expression on the way to the value of one, with its next operation, by the rules of arithmetic."""
    steps = []
    while OPERATION.search(expression):
        inner = re.search(r"\(([^()]*)\)", expression)
        part = inner[1] if inner else expression
        first = re.search(r"\d+ \* \d+", part) or OPERATION.search(part)
        assert first is not None
        steps.append((expression, first[0]))
        expression = reduce(expression, first[0])
    return steps


def read_expression(question: str) -> str:
    """Return the expression in a question."""
    found = max(SPAN.findall(question), key=len)
    return found.strip()


def solve(ask: Ask, session: dict[str, Any], question: str) -> tuple[float, Counter[str]]:
    """
    Let a program solve a task.

    Returns:
        The score and the counts. A right answer has 1, half for each retry; a wrong one, or none, has 0.
    """
    counts: Counter[str] = Counter(retries=0, replies=0, valid=0)
    expression, results = read_expression(question), list[str]()
    steps = solve_steps(expression)
    answer = reduce(*steps[-1])
    next_operation = ask(session, question, counts)
    try:
        for _ in steps:
            operation = next_operation(expression, results)
            expression = reduce(expression, operation)
            results.append(str(compute(operation)))
    except ValueError:
        return 0.0, counts
    return (0.5 ** counts["retries"] if expression == answer else 0.0), counts


def post(access: dict[str, str], path: str, **body: object) -> dict[str, Any] | None:
    """Send a request to the control port, and return its reply; None for an empty one."""
    headers = {"Authorization": f"Bearer {access['secret']}"}
    request = urllib.request.Request(access["url"] + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        text = response.read()
    return json.loads(text) if text else None


def work(ask: Ask, control_file: Path, log: Path) -> None:
    """Solve tasks while the control port is open, and log the counts of each episode."""
    while not control_file.exists():
        time.sleep(0.1)
    access = json.loads(control_file.read_text())

    def run(_number: int) -> None:
        while control_file.exists():
            try:
                leased = post(access, "/tasks/lease", worker="program", wait_s=10)
                if leased is None:
                    continue
                score, counts = solve(ask, leased["session"], leased["task"]["messages"][-1]["content"])
                lease = leased["lease"]
                line = {"step": leased["task"]["global_step"], "score": score, **counts}
                post(access, f"/leases/{lease['id']}/complete", fence=lease["fence"], score=score)
                with log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            except (OSError, urllib.error.URLError) as error:  # the port has closed, or a lease was lost
                print(f"a task was lost: {error}", file=sys.stderr)
                time.sleep(0.5)

    def run_or_exit(number: int) -> None:
        try:
            run(number)
        except Exception:  # noqa: BLE001 - the training waits for all threads, so one that is lost ends the program
            traceback.print_exc()
            os._exit(1)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(run_or_exit, range(NUM_THREADS)))
