"""
The tasks of the multi-turn categories: conversations about programs, such as a file system, that keep a state.

A row has its first question in `messages`, the next ones in `user_replies`, and the right calls of each of the user's
turns in `ground_truth`. Functions that the first prompt withholds are in `later_tools`; a later question has them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from turnwise import Task
from turnwise.errors import DataError
from turnwise.types import JsonDict
from turnwise_bfcl.data_files import read_program
from turnwise_bfcl.schemas import tool_schema

CATEGORIES: Final = (
    "multi_turn_base",
    "multi_turn_miss_func",
    "multi_turn_miss_param",
    "multi_turn_long_context",
)
REPLIES: Final = "user_replies"
"""The column of the later questions, which the interaction `scripted_user` reads."""
PROGRAMS: Final[Mapping[str, str]] = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
"""The files of their functions by class."""
_MORE_FUNCTIONS: Final = "I have updated some more functions you can choose from. What about now?"
"""The leaderboard's sentence, behind the schemas of functions that the prompt has withheld."""
_ENTRY: Final = ("id", "involved_classes", "initial_config")


def read_functions(folder: str | None) -> dict[str, list[JsonDict]]:
    """Return the functions of each program, in the leaderboard's form; `DataError` when they cannot be read."""
    return {program: read_program(name, folder) for program, name in PROGRAMS.items()}


def make_row(
    category: str, entry: Mapping[str, Any], truth: object, programs: Mapping[str, Sequence[JsonDict]]
) -> JsonDict:
    """
    Return the row of an entry; `KeyError`, `TypeError` or `ValueError` when it has another form.

    Args:
        category: of the entry.
        entry: of the leaderboard.
        truth: right calls of each of the user's turns.
        programs: the functions of each, as `read_functions` returns them.
    """
    functions: list[Any] = [each for name in entry["involved_classes"] for each in programs[name]]
    schemas = {each["name"]: tool_schema(each) for each in functions}
    withheld = {
        int(turn): [schemas[name] for name in names] for turn, names in entry.get("missed_function", {}).items()
    }
    later: list[Any] = [schema for each in withheld.values() for schema in each]
    shown: list[Any] = [schema for schema in schemas.values() if schema not in later]
    questions = [_question(messages, withheld.get(turn)) for turn, messages in enumerate(entry["question"])]
    return {
        "uid": entry["id"],
        "messages": [{"role": "user", "content": questions[0]}],
        REPLIES: questions[1:],
        "ground_truth": truth,
        "data_source": category,
        "tools": shown,
        "later_tools": later,
        "bfcl": {
            "category": category,
            # The first of them is in the prompt, by which the reward knows that the prompt shows functions.
            "functions": {schema["function"]["name"]: {} for schema in (*shown, *later)},
            "entry": {name: entry[name] for name in _ENTRY},
        },
    }


def _question(messages: Sequence[Mapping[str, object]], withheld: Sequence[JsonDict] | None) -> str:
    """Return what the user says in a turn; the turn that brings functions has no message in the data."""
    if withheld is None:
        (message,) = messages
        return str(message["content"])
    if messages:
        raise ValueError("a turn that brings functions has a message")
    return "\n".join([*map(json.dumps, withheld), _MORE_FUNCTIONS])


def has_one_turn(task: Task) -> bool:
    """Return whether a task is of another category, in which the model's first turn ends the episode."""
    about: object = task.extra.get("bfcl")
    return isinstance(about, Mapping) and "category" in about and about["category"] not in CATEGORIES


def entry_of(task: Task) -> JsonDict:
    """Return what the programs of a task need; `DataError` when it is of no multi-turn category."""
    about: object = task.extra.get("bfcl")
    entry = about.get("entry") if isinstance(about, Mapping) else None
    if not isinstance(entry, Mapping) or not {*_ENTRY} <= entry.keys() or {*entry["involved_classes"]} - {*PROGRAMS}:
        raise DataError(
            f"task {task.uid!r} (row {task.sample_index}) is of no multi-turn category of BFCL; set data.path to"
            " bfcl:multi_turn_base, or leave the tools 'bfcl' out"
        )
    return {name: entry[name] for name in _ENTRY}
