"""Right calls of possible answers, and calls that differ from them in one or two places."""

from __future__ import annotations

import copy
import random

ODD_VALUES = (
    None,
    True,
    False,
    0,
    1,
    -3,
    2.5,
    5.0,
    "",
    " ",
    "x",
    "A-b_c",
    [],
    [""],
    [1, 2],
    [[1], ["a"]],
    {},
    {"a": 1},
)


def right_calls(answers, rng: random.Random):
    """Return calls with one accepted value of each parameter; some parameters that may be omitted are omitted."""
    return [{name: _pick_all(accepted, rng)} for answer in answers for name, accepted in answer.items()]


def _pick_all(accepted, rng):
    found = {}
    for parameter, values in accepted.items():
        if "" in values and rng.random() < 0.5:
            continue
        given = [value for value in values if value != ""]
        if given:
            found[parameter] = _concrete(rng.choice(given), rng)
    return found


def _concrete(value, rng):
    """Return an accepted value: in an object, each key has a list of those."""
    if isinstance(value, dict):
        return _pick_all({key: each if isinstance(each, list) else [each] for key, each in value.items()}, rng)
    if isinstance(value, list):
        return [_concrete(each, rng) if isinstance(each, dict) else each for each in value]
    return value


def mutate(calls, rng: random.Random):
    """Return a copy with one to three changes."""
    found = copy.deepcopy(calls)
    for _ in range(rng.randint(1, 3)):
        rng.choice((_change_calls, _change_arguments, _change_value, _change_value, _change_value))(found, rng)
    return found


def _change_calls(calls, rng):
    kind = rng.randrange(4)
    if kind == 0 and calls:
        calls.pop(rng.randrange(len(calls)))
    elif kind == 1 and calls:
        calls.append(copy.deepcopy(rng.choice(calls)))
    elif kind == 2:
        rng.shuffle(calls)
    elif calls:
        ((name, arguments),) = calls.pop().items()
        calls.append({rng.choice([name.upper(), name.replace(".", "_"), f"{name}s"]): arguments})


def _change_arguments(calls, rng):
    if not calls:
        return
    (arguments,) = rng.choice(calls).values()
    if arguments and rng.random() < 0.6:
        arguments.pop(rng.choice(list(arguments)))
    else:
        arguments[rng.choice(["other", "unit", "name", "x"])] = rng.choice(ODD_VALUES)


def _change_value(calls, rng):
    """Change one value, at any depth."""
    places = [place for call in calls for arguments in call.values() for place in _places(arguments)]
    if not places:
        return
    holder, key = rng.choice(places)
    holder[key] = _changed(holder[key], rng)


def _places(value):
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def _changed(value, rng):
    if rng.random() < 0.25:
        return copy.deepcopy(rng.choice(ODD_VALUES))
    if isinstance(value, bool):
        return rng.choice([not value, int(value), str(value)])
    if isinstance(value, int):
        return rng.choice([float(value), value + 1, str(value), -value, [value]])
    if isinstance(value, float):
        return rng.choice([int(value), value + 0.1, str(value)])
    if isinstance(value, str):
        changed = [value.upper(), f" {value}.", value.replace(" ", "-"), value.replace("'", '"'), f"{value}!", [value]]
        return rng.choice([*changed, value[:-1], value.title()])
    if isinstance(value, list):
        return rng.choice([value[::-1], value[:-1], [*value, *value[:1]], [str(each) for each in value]])
    if isinstance(value, dict):
        return rng.choice(
            [{**value, "extra": 1}, dict(list(value.items())[1:]), [value], dict(reversed(value.items()))]
        )
    return value
