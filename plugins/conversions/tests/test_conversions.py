"""Episodes in other formats, and conversations as the tokens of a rollout."""

import asyncio
import json
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from attrs import evolve

from turnwise import ModelSpec, Resources, Status
from turnwise.cli import main
from turnwise.errors import DataError
from turnwise.types import TrajectoryScore
from turnwise_calculator_demo import model_dir
from turnwise_chat_templates import load_chat
from turnwise_conversions import encode_demonstration, to_atif, to_chat, to_dataset
from turnwise_conversions.convert_command import FORMATS
from turnwise_result_files import TrajectoryWriter, read_results
from turnwise_testing.probes.agent import AgentProbe, ProbeParser, make_task, probe_resources
from turnwise_tool_agent import make_tool_agent
from turnwise_tool_agent.config import ToolAgentConfig

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
OTHER = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
TURNS = (CALL, "The answer is 42.", '<tool_call>\n{"name": "add"\n</tool_call>')


@cache
def chat():
    """Return the chat template of the tiny calculator model."""
    return load_chat(ModelSpec(path=model_dir()))


@cache
def episodes():
    """Return finished episodes with tools, by the real driver, with rewards 0, 1, 2 and so on."""
    tools = probe_resources().tools
    resources = Resources(chat=chat(), parser=ProbeParser(chat()), tools=tools)
    config = ToolAgentConfig(max_assistant_turns=4, max_parallel_calls=2)
    probe = AgentProbe(
        make_agent=lambda: make_tool_agent(config, resources), resources=resources, turns=TURNS, num_tasks=12
    )
    runs = asyncio.run(probe.run_all())
    found = [evolve(run.result, scores=(TrajectoryScore(value=float(n)),)) for n, run in enumerate(runs)]
    assert any(len(each.messages) > 4 for each in found)
    return tuple(found)


def schemas():
    """Return the schemas of the episodes' tools."""
    return tuple(tool.schema for tool in probe_resources().tools.values())


@pytest.fixture
def run(tmp_path):
    """Return the folder of a rollout with the episodes."""
    with TrajectoryWriter(tmp_path / "run/trajectories.parquet") as writer:
        for each in episodes():
            writer.write(each)
    return tmp_path / "run"


def convert(*arguments):
    """Run the command and return its exit status."""
    return main(["convert", *map(str, arguments)])


def lines_of(path):
    """Return the objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def is_clean(result):
    """Return whether all calls of an episode are well-formed."""
    return not any('"name": "add"\n' in str(message.get("tool_calls")) for message in result.messages) and all(
        to_chat(result)["messages"][i].get("weight", 1) for i in range(len(to_chat(result)["messages"]))
    )


def test_a_demonstration_has_the_tokens_of_the_rollout():
    """The messages of an episode become the ids that the engine saw, and the loss covers the ids that it sampled."""
    clean = [each for each in episodes() if is_clean(each) and each.messages[-1]["role"] == "assistant"]

    assert any("tool_calls" in message for each in clean for message in each.messages)
    for each in clean:
        (trajectory,) = each.trajectories
        made = encode_demonstration(chat(), each.messages, schemas())
        sampled = np.concatenate([np.zeros(trajectory.num_prompt_tokens, bool), trajectory.response_mask == 1])
        assert made.input_ids.tolist() == trajectory.input_ids.tolist()
        assert made.loss_mask.tolist() == sampled.tolist()


def test_a_turn_without_weight_is_context():
    """A turn of weight 0 is in the ids, and not in the loss."""
    messages = [
        {"role": "user", "content": "2+3?"},
        {"role": "assistant", "content": "6", "weight": 0},
        {"role": "user", "content": "No."},
        {"role": "assistant", "content": "5"},
    ]
    made = encode_demonstration(chat(), messages)

    assert chat().text(made.input_ids[made.loss_mask]) == "5"
    assert "6" in chat().tokenizer.decode(made.input_ids)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([{"role": "user", "content": "a"}], "ends with a message of the role assistant"),
        ([{"role": "assistant", "content": "a"}], "starts with a message of another role"),
        ([{"role": "user", "content": "a"}, *[{"role": "assistant", "content": "b"}] * 2], "messages 1 and 2 are both"),
        (
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": "{"}}]},
            ],
            "message 1 has a call without a name",
        ),
    ],
)
def test_a_conversation_that_no_rollout_has_is_refused(messages, text):
    """The error names the message."""
    with pytest.raises(DataError, match=text):
        encode_demonstration(chat(), messages)


def test_atif_has_the_tokens_of_each_turn():
    """Steps count from 1; responses of tools join the step that called; metrics hold the sampled ids."""
    for result in episodes():
        exported = to_atif(result, model="tiny")
        agent_steps = [step for step in exported["steps"] if step["source"] == "agent"]
        (trajectory,) = result.trajectories
        sampled = trajectory.response_ids[trajectory.response_mask == 1].tolist()

        assert [step["step_id"] for step in exported["steps"]] == list(range(1, len(exported["steps"]) + 1))
        assert [i for step in agent_steps for i in step["metrics"]["completion_token_ids"]] == sampled
        assert exported["agent"]["model_name"] == "tiny"
        assert exported["extra"]["reward"] == result.reward
        assert not any(message["role"] == "tool" for message in exported["steps"] if "role" in message)
        json.dumps(exported, allow_nan=False)


def test_atif_fits_harbors_models():
    """Harbor's own models accept every exported episode."""
    trajectories = pytest.importorskip("harbor.models.trajectories", reason="harbor is not installed")

    for result in episodes():
        trajectories.Trajectory.model_validate(to_atif(result, model="tiny"))


def test_fine_tuning_lines_leave_out_what_should_not_be_learned():
    """A malformed call and the task's own turns have weight 0; a line ends with a turn."""
    for result in episodes():
        line = to_chat(result, schemas())
        if line is None:
            continue
        assert line["messages"][-1]["role"] == "assistant"
        assert line["tools"] == list(schemas())
        for message in line["messages"]:
            calls = message.get("tool_calls", [])
            good = all(call["function"]["name"] and json.loads(call["function"]["arguments"]) for call in calls)
            assert good or message["weight"] == 0
    given = make_task(messages=({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}))
    first = episodes()[0]
    result = evolve(first, task=given, messages=(*given.messages, {"role": "user", "content": "c"}))
    assert to_chat(result) is None


@pytest.mark.parametrize("status", [each for each in Status if each is not Status.COMPLETED])
def test_a_turn_that_may_be_cut_off_is_not_learned(status):
    """The last turn has weight 0; a turn before a tool's reply was whole. A failed episode has no line."""
    user, call, reply, answer = (
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": {}}}]},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
        {"role": "assistant", "content": "It is 5, because twenty pl"},
    )
    result = evolve(
        episodes()[0], task=make_task(messages=(user,)), messages=(user, call, reply, answer), status=status
    )
    ends_in_reply = evolve(result, messages=(user, call, reply))
    if status is Status.FAILED:
        assert to_chat(result) is None
        return
    assert [1, 0] == [each.get("weight", 1) for each in to_chat(result)["messages"] if each["role"] == "assistant"]
    assert "weight" not in to_chat(ends_in_reply)["messages"][1]
    whole = evolve(result, status=Status.COMPLETED)
    assert not any("weight" in each for each in to_chat(whole)["messages"])
    assert to_chat(evolve(result, messages=(user, answer))) is None


def test_the_reasoning_of_a_turn_is_kept():
    """The rows of SFT that a file of this format becomes have it too."""
    first = next(each for each in episodes() if is_clean(each))
    messages = [
        {**each, "reasoning_content": "First."} if each["role"] == "assistant" else each for each in first.messages
    ]
    written = to_chat(evolve(first, messages=tuple(messages)))["messages"]
    turns = [each for each in written if each["role"] == "assistant"]
    assert turns
    assert {"First."} == {each["reasoning_content"] for each in turns}


@pytest.mark.parametrize("own", [[OTHER], [], json.dumps([OTHER])], ids=["own", "none", "text"])
def test_a_task_with_its_own_tools(tmp_path, own):
    """Its line has them, and not the run's; the tokens to learn have the prompt with them."""
    first = next(each for each in episodes() if to_chat(each) and is_clean(each))
    task = evolve(first.task, extra={"tools": own})
    with TrajectoryWriter(tmp_path / "run/trajectories.parquet") as writer:
        writer.write(evolve(first, task=task))
    (tmp_path / "tools.json").write_text(json.dumps(schemas()), encoding="utf-8")
    config = {"model": {"path": str(model_dir())}, "data": {"path": "a.jsonl"}, "parser": "hermes"}
    config |= {"agent": "tool_agent", "engine": "transformers", "tools": ["calculator"]}
    (tmp_path / "run.yaml").write_text(json.dumps(config), encoding="utf-8")

    assert (
        convert(tmp_path / "run", "--to", "openai", "--out", tmp_path / "a.jsonl", "--tools", tmp_path / "tools.json")
        == 0
    )
    to_sft = ["--to", "sft", "--config", tmp_path / "run.yaml", "--out", tmp_path / "a.parquet"]
    assert convert(tmp_path / "a.jsonl", *to_sft) == 0

    (line,) = lines_of(tmp_path / "a.jsonl")
    wanted = json.loads(own) if isinstance(own, str) else own
    assert line["tools"] == wanted
    (ids,) = pq.read_table(tmp_path / "a.parquet")["input_ids"].to_pylist()
    assert ids[: len(prompt := chat().prompt(task.messages, wanted))] == prompt.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("own", [None, [OTHER], []], ids=["the run's tools", "its tools", "no tools"])
@pytest.mark.parametrize(
    "agent",
    [
        {"name": "tool_agent"},
        {"name": "tool_agent", "system_prompt": "Be brief."},
        {"name": "tool_agent", "tools_in_prompt": True},
        {"name": "single_turn", "system_prompt": "Be brief."},
    ],
    ids=["plain", "system prompt", "tools in prompt", "single turn"],
)
def test_the_prompt_is_the_one_of_the_runs_agent(tmp_path, agent, own):
    """With --config, the row of a conversation begins as a rollout of its task does, whatever the agent's options."""
    question = {"role": "user", "content": "What is 2 + 3?"}
    column = {} if own is None else {"tools": own}
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"uid": "a", "messages": [question], **column}) + "\n")
    messages = [question, {"role": "assistant", "content": "5"}]
    (tmp_path / "demo.jsonl").write_text(json.dumps({"messages": messages, **column}) + "\n")
    config = {"model": {"path": str(model_dir())}, "data": {"path": "tasks.jsonl"}, "parser": "hermes", "agent": agent}
    config |= {"engine": "transformers", "tools": ["calculator"], "rollout": {"response_length": 4}}
    (tmp_path / "run.yaml").write_text(json.dumps(config), encoding="utf-8")

    assert main(["rollout", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "run")]) == 0
    to_sft = ["--to", "sft", "--config", tmp_path / "run.yaml", "--out", tmp_path / "a.parquet"]
    assert convert(tmp_path / "demo.jsonl", *to_sft) == 0

    (result,) = read_results(tmp_path / "run")
    prompt = result.trajectories[0].prompt_ids.tolist()
    (ids,) = pq.read_table(tmp_path / "a.parquet")["input_ids"].to_pylist()
    assert ids[: len(prompt)] == prompt
    assert chat().text(ids[len(prompt) : -1]) == "5"


def test_a_dataset_has_a_row_for_each_trajectory(run):
    """One call turns the folder of a run into a typed dataset."""
    pytest.importorskip("datasets", reason="datasets is not installed")
    dataset = to_dataset(run)

    assert len(dataset) == len(episodes())
    for row, result in zip(dataset, episodes(), strict=True):
        (trajectory,) = result.trajectories
        assert row["reward"] == result.reward
        assert row["response_ids"] == trajectory.response_ids.tolist()
        assert [message["content"] for message in row["messages"]] == [m["content"] for m in result.messages]


def test_the_command_writes_each_format(run, tmp_path, capsys):
    """Episodes go out, and the fine-tuning lines come back in as tokens."""
    pytest.importorskip("datasets", reason="datasets is not installed")
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(list(schemas())), encoding="utf-8")

    assert convert(run, "--to", "atif", "--out", tmp_path / "a.jsonl") == 0
    assert convert(run, "--to", "openai", "--out", tmp_path / "o.jsonl", "--tools", tools, "--min-reward", 4) == 0
    assert convert(run, "--to", "datasets", "--out", tmp_path / "d") == 0
    assert len(lines_of(tmp_path / "a.jsonl")) == 12
    chosen = [line for line in lines_of(tmp_path / "o.jsonl") if all(m.get("weight", 1) for m in line["messages"])]
    assert 0 < len(chosen) <= 8
    (tmp_path / "chosen.jsonl").write_text("\n".join(map(json.dumps, chosen)), encoding="utf-8")
    source = tmp_path / "chosen.jsonl"
    assert convert(source, "--to", "sft", "--model", model_dir(), "--out", tmp_path / "s.parquet") == 0

    rows = pq.read_table(tmp_path / "s.parquet").to_pylist()
    assert len(rows) == len(chosen)
    for row in rows:
        pairs = zip(row["input_ids"], row["loss_mask"], row["labels"], strict=True)
        assert all(label == (token if trained else -100) for token, trained, label in pairs)
    assert "of 12 written as openai" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--to", "sft", "--model", "nowhere"], "--model is for conversations"),
        (["--to", "atif", "--tools", "x"], "--tools is for openai and sft, not for atif"),
        (["--to", "openai", "--tools", "missing.json"], "--tools missing.json: cannot be read"),
        (["--to", "openai", "--model", "x"], "--model is for atif and sft, not for openai"),
    ],
)
def test_wrong_options_are_one_line(run, tmp_path, capsys, arguments, text):
    """Nothing is written, and the error says what to give."""
    assert convert(run, "--out", tmp_path / "x", *arguments) != 0
    assert text in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [([], "--to sft needs --model"), (["--model", "nowhere"], "--model: there is no directory")],
)
def test_conversations_need_a_model(tmp_path, capsys, arguments, text):
    """Their tokens are those of its template."""
    (tmp_path / "tune.jsonl").touch()
    assert convert(tmp_path / "tune.jsonl", "--out", tmp_path / "x", "--to", "sft", *arguments) != 0
    assert text in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_nothing_is_overwritten(run, tmp_path, capsys):
    """A file that exists stays as it is."""
    (tmp_path / "x").write_text("mine", encoding="utf-8")

    assert convert(run, "--to", "atif", "--out", tmp_path / "x") != 0
    assert (tmp_path / "x").read_text(encoding="utf-8") == "mine"
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["atif", "openai", "datasets"])
def test_a_place_that_cannot_be_written_is_one_line(run, tmp_path, capsys, form):
    """Below a file, in a folder of the kernel, or with a name that is too long."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    for out in (tmp_path / "file" / "x", Path("/proc/x/y"), tmp_path / ("x" * 300)):
        assert convert(run, "--to", form, "--out", out) == 2
        assert capsys.readouterr().err.startswith(f"turnwise: error: --out {out}: ")


def test_a_text_with_other_line_breaks(tmp_path):
    """Within a text of JSON, characters that only some readers take for line breaks end no line."""
    text = "a\u2028b\u2029c\x85d"
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    line = json.dumps({"messages": messages}, ensure_ascii=False)
    (tmp_path / "in.jsonl").write_text(f"{line}\n{line}\n", encoding="utf-8")

    assert convert(tmp_path / "in.jsonl", "--to", "sft", "--model", model_dir(), "--out", tmp_path / "out.parquet") == 0
    assert 2 == pq.read_table(tmp_path / "out.parquet").num_rows


@pytest.mark.parametrize(
    ("line", "text"),
    [("{", "line 2: invalid JSON"), ('{"prompt": 1}', "line 2: prompt: expected a list of {role, content}, got int")],
)
def test_a_wrong_line_is_named(tmp_path, capsys, line, text):
    """The error names the file and the line."""
    good = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    (tmp_path / "in.jsonl").write_text(f"{good}\n{line}\n", encoding="utf-8")

    assert convert(tmp_path / "in.jsonl", "--to", "sft", "--model", model_dir(), "--out", tmp_path / "x") != 0
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--to", form] for form in FORMATS] + [["--to", "sft", "--model", "m"]])
def test_a_source_that_does_not_exist(tmp_path, capsys, options):
    """The line says so, and asks for no option."""
    assert convert(tmp_path / "nosuch", *options, "--out", tmp_path / "x") == 2
    assert capsys.readouterr().err == f"turnwise: error: {tmp_path / 'nosuch'}: does not exist\n"


@pytest.mark.parametrize("form", ["atif", "openai", "datasets"])
def test_a_source_of_another_kind(tmp_path, capsys, form):
    """A file with another ending has no rows, so none is named."""
    (tmp_path / "README.md").write_text("x", encoding="utf-8")
    assert convert(tmp_path / "README.md", "--to", form, "--out", tmp_path / "x") == 2
    expected = f"turnwise: error: {tmp_path / 'README.md'}: suffix '.md' is none of .parquet, .jsonl\n"
    assert capsys.readouterr().err == expected
