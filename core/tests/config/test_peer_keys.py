"""Keys of verl and TRL in a config: the error names ours, and every entry of the table is true."""

import importlib.metadata

import attrs
import pytest

from turnwise.config.file import load_config
from turnwise.config.parts import Choice, file_fields
from turnwise.config.peer_keys import PEER_KEYS, TRL, find_peer_key
from turnwise.config.run import RunConfig
from turnwise.errors import ConfigError
from turnwise.plugin.host import load
from turnwise.types import PluginRecipe

CONFIG = {"data": {"path": "x.jsonl"}, "agent": "a", "engine": "e"}
OURS = sorted({entry.ours for entry in PEER_KEYS if entry.ours})


def mismatches(*overrides, **sections):
    """Return the lines of the error of a config."""
    with pytest.raises(ConfigError) as caught:
        load_config({**CONFIG, **sections}, overrides)
    return [line.partition(": ")[2] for line in str(caught.value).splitlines()]


@pytest.mark.parametrize("entry", PEER_KEYS, ids=lambda entry: f"{entry.peer} {entry.key}")
def test_every_key_is_recognised_where_its_users_write_it(entry):
    """As an override on the command line, and as nested sections of a file; never as another unknown key."""
    by_override = mismatches(f"{entry.key}=1")
    nested = 1
    for name in reversed(entry.key.split(".")[1:]):
        nested = {name: nested}
    first = entry.key.split(".")[0]
    section = {**CONFIG[first], **nested} if first in CONFIG and isinstance(nested, dict) else nested
    by_section = mismatches(**{first: section})

    assert by_override == [f"{entry.key}: unknown key; {entry.hint}"]
    assert by_section == by_override


@pytest.mark.parametrize("entry", PEER_KEYS, ids=lambda entry: f"{entry.peer} {entry.key}")
def test_every_entry_says_something(entry):
    """A key of ours, or the reason why there is none."""
    assert entry.ours or entry.note
    assert find_peer_key(entry.key).ours == entry.ours


def fields_below(kind, path=""):
    """Yield the dotted names of a config class, sections included."""
    for item in file_fields(kind):
        yield f"{path}{item.name}"
        members = [each for each in (item.type, *getattr(item.type, "__args__", ())) if attrs.has(each)]
        for member in members:
            if member is not Choice:
                yield from fields_below(member, f"{path}{item.name}.")


@pytest.fixture(scope="module")
def known():
    """The dotted names of all keys of a config, options of plugins and of the trainer included."""
    found = set(fields_below(RunConfig))
    host = load(PluginRecipe())
    for section, kind in (("agent", "agents"), ("engine", "engines")):
        found.add(f"{section}.name")
        for entry in host.registry(kind).entries().values():
            found |= set(fields_below(entry.config, f"{section}."))
    trainer = pytest.importorskip("turnwise_grpo_trainer.config", reason="the trainer is not installed")
    found |= set(fields_below(trainer.TrainConfig, "train."))
    return found | {"data.columns.prompt", "data.columns.data_source"}


@pytest.mark.parametrize("ours", OURS)
def test_every_key_of_ours_exists(ours, known):
    """The table cannot name a key that was renamed."""
    assert ours in known


@pytest.mark.parametrize("entry", [each for each in PEER_KEYS if each.peer == TRL], ids=lambda entry: entry.key)
def test_every_key_of_trl_exists(entry):
    """Names of the installed TRL, or of its releases before."""
    pytest.importorskip("torch", reason="TRL needs torch")
    grpo = pytest.importorskip("trl.trainer.grpo_config", reason="TRL is not installed")
    arguments = {*grpo.GRPOConfig.__dataclass_fields__, "reward_funcs"}
    # Removed in 1.x, and still in the scripts of users.
    assert entry.key in arguments | {"max_prompt_length"}, importlib.metadata.version("trl")


@pytest.mark.parametrize(
    ("sections", "lines"),
    [
        pytest.param(
            {"actor_rollout_ref": {"rollout": {"temperature": 0.5, "n": 8, "nothing": 1}}},
            [
                "actor_rollout_ref.rollout.temperature: unknown key; a key of verl; use rollout.sampling.temperature",
                "actor_rollout_ref.rollout.n: unknown key; a key of verl; use rollout.n",
                "actor_rollout_ref.rollout.nothing: unknown key; it has no equal here",
            ],
            id="a section of verl",
        ),
        pytest.param(
            {"rollout": {"tensor_model_parallel_size": 2}},
            ["rollout.tensor_model_parallel_size: unknown key; a key of verl; use engine.tensor_parallel_size"],
            id="in our section",
        ),
        pytest.param(
            {"rollout": {"num_generations": 2}},
            ["rollout.num_generations: unknown key; a key of TRL; use rollout.n"],
            id="TRL in our section",
        ),
        pytest.param(
            {"telemetry": {"format": "json"}},
            ["telemetry.format: unknown key; expected one of log_level, log_format"],
            id="a common word elsewhere",
        ),
    ],
)
def test_errors_name_our_keys(sections, lines):
    """Each key of a section has a line; words that only look like a key of a peer have the usual hint."""
    found = mismatches(**sections)

    assert [line.partition("; did you mean")[0] for line in found] == [
        line.partition("; expected one of")[0] for line in lines
    ]
