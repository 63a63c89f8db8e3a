"""`turnwise pool`: looks at a task pool, exports its results, and hands dead rollouts out again."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from attrs import asdict

from turnwise.errors import DataError, InfrastructureError
from turnwise.terminal import write_output
from turnwise.types import JsonDict
from turnwise_task_pool.pool.store import RolloutView, State

_COLUMNS = ("uid", "step", "rollout", "state", "attempts", "worker", "expires in s", "reason")


class PoolCommand:
    """Shows and mends task pools."""

    help = "show a task pool, export its results, and hand dead rollouts out again"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = (
            "Examples:\n"
            "  turnwise pool status pool.sqlite\n"
            "  turnwise pool status runs/control.json\n"
            "  turnwise pool list pool.sqlite --state dead\n"
            "  turnwise pool requeue pool.sqlite task-7\n"
            "  turnwise pool export pool.sqlite > results.jsonl\n\n"
            "Exit codes: 0; 2 for bad input; 1 when a control port cannot be asked."
        )
        actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, help="see ACTION --help")
        status = _add(actions, "status", "count the rollouts by state; show leases, and dead ones with the reason")
        status.add_argument("--json", action="store_true", help="print JSON instead of tables")
        listing = _add(actions, "list", "show every rollout")
        listing.add_argument("--state", choices=[str(state) for state in State], help="only these")
        listing.add_argument("--json", action="store_true", help="print JSON instead of a table")
        requeue = _add(actions, "requeue", "hand dead rollouts out again, with all their attempts", aliases=["retry"])
        requeue.add_argument("uids", nargs="*", metavar="UID", help="only rollouts of these tasks; all if left out")
        _add(actions, "export", "write the results as JSON lines")

    def run(self, arguments: argparse.Namespace) -> int:
        # Imported here: a list of all commands needs no database and no tables.
        from turnwise_task_pool.pool.sqlite_store import SqliteStore

        action, path = arguments.action, arguments.pool
        if action == "status" and path.suffix == ".json":
            _print_counts(_ask(path), as_json=arguments.json)
            return 0
        with SqliteStore.reading(path) as pool:
            if action == "export":
                for result in pool.results(limit=-1):
                    write_output(json.dumps(asdict(result)) + "\n")
            elif action == "requeue":
                with closing(SqliteStore.open(path)) as store:
                    number = store.reopen_dead(arguments.uids)
                write_output(f"rollouts that are ready again: {number}\n")
            elif action == "list":
                rollouts = pool.rollouts(now=time.time())
                chosen = [each for each in rollouts if arguments.state in (None, each.state)]
                _print_rollouts(chosen, as_json=arguments.json)
            else:
                _print_status(pool.rollouts(now=time.time()), as_json=arguments.json)
        return 0


def _add(actions: Any, name: str, text: str, aliases: Sequence[str] = ()) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text, aliases=aliases)
    kind = "file of a pool, or JSON file of a control port" if name == "status" else "file of a pool"
    parser.add_argument("pool", type=Path, metavar="POOL", help=kind)
    parser.set_defaults(action=name)
    return parser


def _ask(file: Path) -> JsonDict:
    """Return the counts of a running control port."""
    import urllib.error
    import urllib.request

    try:
        access = json.loads(file.read_text(encoding="utf-8"))
        request = urllib.request.Request(
            f"{access['url']}/tasks", headers={"Authorization": f"Bearer {access['secret']}"}
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file}: not the file of a control port: {error!r}") from error
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            counts: JsonDict = json.loads(response.read())["stats"]
    except urllib.error.HTTPError as error:
        reason = "it has no task pool" if error.code == 404 else f"it answered {error.code}"
        raise InfrastructureError(f"the control port of {file} cannot be asked: {reason}") from error
    except OSError as error:
        raise InfrastructureError(f"the control port of {file} cannot be asked: {error}") from error
    return counts


def _print_status(rollouts: Sequence[RolloutView], *, as_json: bool) -> None:
    found = Counter(each.state for each in rollouts)
    counts: JsonDict = {str(state): found[state] for state in State}
    leased, dead = ([each for each in rollouts if each.state is state] for state in (State.LEASED, State.DEAD))
    if as_json:
        shown = {"counts": counts, "leased": list(map(asdict, leased)), "dead": list(map(asdict, dead))}
        write_output(json.dumps(shown, indent=2) + "\n")
        return
    _print_counts(counts, as_json=False)
    if leased or dead:
        _print_rollouts([*leased, *dead], as_json=False)


def _print_counts(counts: JsonDict, *, as_json: bool) -> None:
    if as_json:
        write_output(json.dumps({"counts": counts}, indent=2) + "\n")
    else:
        write_output("".join(f"{name:<10} {number}\n" for name, number in counts.items()))


def _print_rollouts(rollouts: Iterable[RolloutView], *, as_json: bool) -> None:
    if as_json:
        write_output(json.dumps([asdict(each) for each in rollouts], indent=2) + "\n")
        return
    from rich.table import Table
    from rich.text import Text

    from turnwise.console import Console

    table = Table(*_COLUMNS)
    for each in rollouts:
        table.add_row(*(Text("" if value is None else str(value)) for value in asdict(each).values()))
    Console().print(table)
