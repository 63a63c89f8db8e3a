"""Runs of the matrix of options: entries that are joined into few configs, and the search for what fails in one."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from attrs import frozen
from option_table import ALL_TAGS, GPT_OSS_TOKENS, INSTEAD, NEEDS, NEEDS_ON_RAY, NOTES, VALUES
from option_walk import Key, keys_of_parts, keys_of_sections, patch, places
from option_walk import Path as Place

from turnwise.cli import main
from turnwise.plugin.host import Host
from turnwise_testing.inputs.tokenizers import CHATML, TAGS, byte_tokenizer
from turnwise_testing.whole_runs.installation import install_plugin

HERE: Final = Path(__file__).parent
LISTS: Final = ("tools", "observers", "middleware", "postprocessors")
BASE: Final[dict[str, Any]] = {
    "model": {"path": "model"},
    "data": {"path": "data.jsonl", "limit": 2},
    "agent": {"name": "tool_agent"},
    "engine": {"name": "matrix"},
    "parser": {"name": "hermes"},
    "reward": {"name": "matrix_length"},
    "tools": {"calculator": {}},
    "rollout": {"prompt_length": 4096, "response_length": 200},
}


@frozen
class Entry:
    """
    One value of one key, or one part, with what it needs.

    Attributes:
        name: `key=value`.
        changes: the values to set, by their paths.
    """

    name: str
    changes: Mapping[Place, Any]


def values_of(key: Key) -> tuple[Any, ...]:
    """Return the values of a key; none if nothing says them."""
    return INSTEAD.get(key.name) or VALUES.get(key.name) or key.values or ()


def entry_of(key: Key, value: Any, part: str = "", *, on_ray: bool = False) -> Entry:
    """Return the entry of a value; `part` is `kind/name` for an option."""
    name = f"{key.name}={value}"
    changes: dict[Place, Any] = {}
    if part:
        changes |= part_changes(part, on_ray=on_ray)
    pieces = key.name.split(".")
    for wanted in [".".join(pieces[: end + 1]) for end in range(len(pieces))] + [name]:
        needed(changes, wanted, on_ray=on_ray)
    for place, item in patch(key.path, value).items():
        put(changes, place, item)
    return Entry(name, changes)


def part_changes(part: str, *, on_ray: bool = False) -> dict[Place, Any]:
    """Return the changes that choose a part."""
    kind, _, name = part.partition("/")
    place = places()[kind]
    changes: dict[Place, Any] = {(*place, name): {}} if place[0] in LISTS else {(*place, "name"): name}
    for wanted in (kind, part):
        needed(changes, wanted, on_ray=on_ray)
    return changes


def needed(changes: dict[Place, Any], name: str, *, on_ray: bool) -> None:
    """Add what a kind, a part, a section, a key or a value needs."""
    if wanted := NEEDS.get(name) or (NEEDS_ON_RAY.get(name) if on_ray else None):
        for place, item in patch((), wanted).items():
            put(changes, place, item)


def put(changes: dict[Place, Any], place: Place, value: Any) -> None:
    """Set a value in place of everything at, above and below its path."""
    for other in [each for each in changes if is_beside(each, place)]:
        del changes[other]
    changes[place] = value


def is_beside(one: Place, other: Place) -> bool:
    """Return whether one of two paths starts with the other."""
    short = min(len(one), len(other))
    return one[:short] == other[:short]


def entries(host: Host, *, on_ray: bool = False) -> Iterator[Entry]:
    """Yield the entries of every key of a run config, and of every part with its options."""
    for key in keys_of_sections():
        for value in values_of(key):
            yield entry_of(key, value, on_ray=on_ray)
    for kind, name, keys in keys_of_parts(host):
        part = f"{kind}/{name}"
        if "matrix" not in name:
            yield Entry(part, part_changes(part, on_ray=on_ray))
        for key in keys:
            for value in values_of(key) if "matrix" not in name else ():
                yield entry_of(key, value, part, on_ray=on_ray)


def fits(merged: Mapping[Place, Any], changes: Mapping[Place, Any]) -> bool:
    """Return whether two sets of changes can be in one config."""
    for place, value in changes.items():
        for other, held in merged.items():
            if is_beside(place, other) and not (
                (place == other and held == value and type(held) is type(value))
                or (len(other) < len(place) and held == {})
                or (len(place) < len(other) and value == {})
            ):
                return False
    return True


def rounds(found: Iterable[Entry]) -> list[list[Entry]]:
    """Join entries that do not contradict each other, each into the first config that has room for it."""
    made: list[tuple[list[Entry], dict[Place, Any]]] = []
    for entry in found:
        room = next((each for each in made if fits(each[1], entry.changes)), None)
        if room is None:
            room = ([], {})
            made.append(room)
        room[0].append(entry)
        room[1].update(entry.changes)
    return [members for members, _merged in made]


def config_of(found: Iterable[Entry], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the config of entries that fit together."""
    leaves = dict(patch((), BASE if base is None else base))
    for entry in found:
        for place, value in entry.changes.items():
            if value == {} and any(other[: len(place)] == place for other in leaves):
                continue
            for other in [each for each in leaves if is_beside(each, place)]:
                if not (len(other) < len(place) and leaves[other] == {} and place[0] in LISTS):
                    del leaves[other]
            leaves[place] = value
    tree: dict[Any, Any] = {}
    for place, value in sorted(leaves.items(), key=lambda each: len(each[0])):
        node = tree
        for step in place[:-1]:
            node = node.setdefault(step, {})
        node.setdefault(place[-1], value if value != {} else {}) if value == {} else node.__setitem__(place[-1], value)
    return _with_lists(tree)


def _with_lists(tree: dict[Any, Any]) -> dict[str, Any]:
    plain = {name: _plain(item) for name, item in tree.items()}
    for name in LISTS:
        if name in plain:
            plain[name] = [{"name": each, **options} for each, options in plain[name].items()]
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        if value and all(isinstance(key, int) for key in value):
            return [_plain(item) for _key, item in sorted(value.items())]
        return {key: _plain(item) for key, item in value.items()}
    return value


def search(found: Sequence[Entry], try_out: Callable[[Sequence[Entry]], str]) -> dict[str, str]:
    """Return the smallest joins of entries that fail, with the texts of `try_out`, which is empty for success."""
    text = try_out(found)
    if not text:
        return {}
    if len(found) == 1:
        return {found[0].name: text}
    half = len(found) // 2
    if failed := search(found[:half], try_out) | search(found[half:], try_out):
        return failed
    few = [*_needed(found[:half], found[half:], try_out), *_needed(found[half:], found[:half], try_out)]
    return {" with ".join(each.name for each in few): text}


def narrow(found: Sequence[Entry], try_out: Callable[[Sequence[Entry]], str]) -> dict[str, str]:
    """
    Return one small join of entries that fails, with its text; empty if all of them together succeed.

    It takes two runs for each half at most, where `search` may need two for each entry: a run on Ray takes seconds.
    """
    text = try_out(found)
    while text and len(found) > 1:
        half = len(found) // 2
        failed = next(((part, why) for part in (found[:half], found[half:]) if (why := try_out(part))), None)
        if failed is None:
            break
        found, text = failed
    return {" with ".join(each.name for each in found): text} if text else {}


def _needed(
    found: Sequence[Entry], others: Sequence[Entry], try_out: Callable[[Sequence[Entry]], str]
) -> Sequence[Entry]:
    """Return the few entries that fail with the others, as all of them do."""
    if len(found) == 1:
        return found
    first, second = found[: len(found) // 2], found[len(found) // 2 :]
    for part in (first, second):
        if try_out([*part, *others]):
            return _needed(part, others, try_out)
    return [*_needed(first, [*second, *others], try_out), *_needed(second, [*first, *others], try_out)]


def write_site(folder: Path) -> Path:
    """Write the files of the runs to a folder, and return the folder with the plugin."""
    site = folder / "site"
    install_plugin(site, "turnwise_matrix", (HERE / "turnwise_matrix.py").read_text(encoding="utf-8"), entry="matrix")
    shutil.copy(HERE / "matrix_code.py", site / "matrix_code.py")
    shutil.copy(HERE / "matrix_code.py", folder / "own.py")
    byte_tokenizer(tags=(*TAGS, *ALL_TAGS)).save_pretrained(folder / "model")
    byte_tokenizer(None, GPT_OSS_TOKENS, eos_token="<|return|>").save_pretrained(folder / "gpt_oss")
    (folder / "template.jinja").write_text(CHATML + "{%- if enable_thinking %}{% endif %}", encoding="utf-8")
    questions = [f"What is {i}+2?" for i in range(6)]
    rows = [
        {
            "prompt": [{"role": "user", "content": each}],
            "question": each,
            "truth": "3",
            "ground_truth": "3",
            "user_goal": "A sum.",
        }
        for each in questions
    ]
    lines = "\n".join(map(json.dumps, rows))
    (folder / "data.jsonl").write_text(lines, encoding="utf-8")
    of_bfcl = [{**row, "tools": [], "bfcl": {"category": "irrelevance", "functions": {}}} for row in rows]
    (folder / "bfcl.jsonl").write_text("\n".join(map(json.dumps, of_bfcl)), encoding="utf-8")
    scenes = [{**row, "ground_truth": "dots"} for row in rows]
    (folder / "scenes.jsonl").write_text("\n".join(map(json.dumps, scenes)), encoding="utf-8")
    graded = [{**row, "tests": {"command": ["true"]}} for row in rows]
    (folder / "graded.jsonl").write_text("\n".join(map(json.dumps, graded)), encoding="utf-8")
    (folder / "data.json").write_text(json.dumps(rows), encoding="utf-8")
    table = "prompt,question,truth,ground_truth,user_goal\n" + "".join(f"{q},{q},3,3,A sum.\n" for q in questions)
    (folder / "data.csv").write_text(table, encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")
    package = site / "matrix_data"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "data.jsonl").write_text(lines, encoding="utf-8")
    (folder / "tools.yaml").write_text("tools: [matrix_echo]\n", encoding="utf-8")
    (folder / "verl_tools.yaml").write_text("tools: [{class_name: matrix_code.Adder, config: {}}]\n", encoding="utf-8")
    users = "interaction: [{name: repeater, class_name: matrix_code.Repeater, config: {}}]\n"
    (folder / "verl_users.yaml").write_text(users, encoding="utf-8")
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": {"more": NOTES}}), encoding="utf-8")
    return site


def command(*words: str) -> tuple[int, str]:
    """Run the command line in this process, and return its exit code and standard error."""
    errors = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(errors):
        code = main(list(words))
    return code, errors.getvalue()


def write_config(folder: Path, config: Mapping[str, Any]) -> str:
    """Write a config and return its path."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
    return str(file)
