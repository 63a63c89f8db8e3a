"""Configs that were written down are read back as the same configs, whatever text is in them."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from turnwise.config.file import dump_yaml, load_config, structure_config, to_dict
from turnwise.config.parts import ToolChoice
from turnwise.config.run import (
    Choice,
    DataConfig,
    Deadlines,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TelemetryConfig,
)
from turnwise.config.runtime import MOST_PROCESSES, RuntimeConfig
from turnwise.types import SamplingParams

# Every text that YAML 1.1, YAML 1.2 or PyYAML's scanner gives a special meaning can occur here.
TRAPS = ["", "yes", "no", "on", "~", "null", "1e3", "1e-3", "012", "0o7", "0x1f", "3:30", "=", "<<", "2026-01-01"]
TRAPS += [
    "- a",
    "a: b",
    "# c",
    "a #b",
    "*a",
    "&a",
    "!t",
    "%d",
    "@x",
    "`x",
    "'",
    '"',
    "{",
    "[",
    "|",
    ">",
    "?",
    "---",
    "...",
]
TRAPS += [
    " lead",
    "trail ",
    "a\nb",
    "a\n\nb\n",
    "\t",
    "\x85",
    "\u2028",
    "\ufeff",
    "\x00",
    "\x7f",
    "😀",
    ".inf",
    ".nan",
    "1_000",
]
text = st.sampled_from(TRAPS) | st.text(max_size=20)
name = text.filter(bool)
names = name.filter(lambda each: ":" not in each) | st.sampled_from(["m.n:f", "./own.py:C"])
integers = st.integers(-(2**63 - 1), 2**63 - 1)
scalars = st.none() | st.booleans() | integers | st.floats(allow_nan=False, allow_infinity=False) | text
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(text, v, max_size=3), max_leaves=8)
options = st.dictionaries(text.filter(lambda key: key not in ("name", "class")), values, max_size=3)
choices = st.builds(Choice, names, options)
counts = st.integers(1, 2**40)
seconds = st.floats(1e-9, 1e12)
samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 1e6),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.just(-1) | counts,
    max_tokens=st.none() | counts,
    stop_token_ids=st.lists(integers, max_size=3).map(tuple),
    stop=st.lists(text, max_size=3).map(tuple),
    seed=st.none() | integers,
)
rollouts = st.builds(
    RolloutConfig,
    n=counts,
    seed=st.integers(0, 2**40),
    validation=st.booleans(),
    sampling=samplings,
    validation_sampling=samplings,
    deadlines=st.builds(Deadlines, tool_call_s=seconds, turn_s=seconds, episode_s=seconds),
    max_in_flight=counts,
    check_invariants=st.booleans(),
)
models = st.builds(
    ModelConfig,
    path=st.none() | name,
    trust_remote_code=st.booleans(),
    revision=st.just("0123456789" * 4),
    template_options=options,
)
tools = st.builds(ToolChoice, names, options.map(lambda each: {k: v for k, v in each.items() if k != "schema"}))
configs = st.builds(
    RunConfig,
    data=st.builds(DataConfig, path=name, limit=st.none() | counts, shuffle=st.booleans()),
    agent=choices,
    engine=choices,
    model=models,
    agents=st.dictionaries(text.filter(str.strip), choices, max_size=2),
    parser=st.none() | choices,
    reward=st.none() | choices,
    tools=st.lists(tools, max_size=3).map(tuple),
    modules=st.just(("m",)),
    observers=st.lists(choices, max_size=2).map(tuple),
    rollout=rollouts,
    runtime=st.builds(RuntimeConfig, num_workers=st.integers(1, MOST_PROCESSES)),
    telemetry=st.builds(TelemetryConfig, log_level=st.sampled_from(["debug", "error"])),
    plugins=st.none() | st.lists(text, max_size=2).map(tuple),
    base_dir=st.just(Path("/base")),
)


def test_the_dump_repeats_values_instead_of_pointing_at_them(tmp_path):
    """Values that are shared in memory would become aliases, which the reader refuses."""
    shared = {"k": ["x"]}
    config = RunConfig(
        data=DataConfig(path="t"),
        agent=Choice("a", shared),
        engine=Choice("e", {"one": shared, "two": shared}),
        base_dir=tmp_path,
    )
    path = tmp_path / "run.yaml"
    path.write_text(dump_yaml(config))
    assert config == load_config(path)


@given(configs)
def test_structuring_inverts_unstructuring(config):
    """A config equals its plain values."""
    assert config == structure_config(to_dict(config), config.base_dir)


@given(configs)
def test_yaml_reads_back_as_what_was_dumped(tmp_path_factory, config):
    """Writing a config down loses nothing, whatever text is in it."""
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(dump_yaml(config), newline="")
    assert to_dict(config) == to_dict(load_config(path))
