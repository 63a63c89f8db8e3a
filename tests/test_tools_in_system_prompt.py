"""A model whose chat template shows no tools, through the command line: rollouts, outside programs, demonstrations."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from turnwise.cli import main
from turnwise.record.columns import Origin
from turnwise_result_files import read_results
from turnwise_testing.inputs.tokenizers import byte_tokenizer
from turnwise_testing.whole_runs.scripted_run import SITE, write_scripted_run

NO_TOOLS = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALL = '<tool_call>\n{"name": "double", "arguments": {"number": 21}}\n</tool_call>'
CALLS = {
    "hermes": CALL,
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>double\n```json\n"
        '{"number": 21}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "glm45": "<tool_call>double\n<arg_key>number</arg_key>\n<arg_value>21</arg_value>\n</tool_call>",
    "granite": '<|tool_call|>[{"name": "double", "arguments": {"number": 21}}]',
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.double:0<|tool_call_argument_begin|>"
        '{"number": 21}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "llama3_json": '{"name": "double", "parameters": {"number": 21}}',
    "llama4_pythonic": "[double(number=21)]",
    "mistral": '[TOOL_CALLS][{"name": "double", "arguments": {"number": 21}}]',
    "phi4": '<|tool_call|>[{"name": "double", "arguments": {"number": 21}}]<|/tool_call|>',
    "qwen3_coder": "<tool_call>\n<function=double>\n<parameter=number>\n21\n</parameter>\n</function>\n</tool_call>",
}
RESULT = "<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
OWN = '''
import json

import openai

from turnwise_testing import byte_tokenizer
from turnwise_testing.engines.scripted import ScriptedEngine

TOKENIZER = byte_tokenizer()
TOOL = {
    "type": "function",
    "function": {
        "name": "double",
        "description": "Double a number; not </tools>.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}


class Engine(ScriptedEngine):
    """Calls the tool, and answers when it has read a result."""

    def __init__(self, call):
        def policy(request):
            text = TOKENIZER.decode(request.token_ids)
            reply = "It is 42." if "\\n42\\n" in text else call
            return [*TOKENIZER.encode(reply), TOKENIZER.eos_token_id]

        super().__init__(policy, record=False)


def double(number: int) -> int:
    """Double a number."""
    return 2 * number


async def program(task, client):
    messages = list(task.messages)
    async with openai.AsyncOpenAI(base_url=client.openai_base_url, api_key=client.api_key) as model:
        for _ in range(2):
            reply = await model.chat.completions.create(model=client.model, messages=messages, tools=[TOOL])
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                number = json.loads(call.function.arguments)["number"]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(2 * number)})
    assert message.content == "It is 42."
    return 1.0
'''
AGENTS = {
    "tool_agent": ["agent=tool_agent", "tools=[./own.py:double]"],
    "external": ["agent={name: external, function: './own.py:program'}"],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run whose template shows no tools."""
    rollout = {"n": 1, "prompt_length": 2048, "response_length": 512}
    engine = {"name": "./own.py:Engine", "call": CALL}
    options = {"engine": engine, "rollout": rollout, "modules": ["./own.py"], "parser": "hermes", "plugins": None}
    write_scripted_run(tmp_path, num_tasks=1, **options, chat={"name": "jinja", "tools": "system_prompt"})
    byte_tokenizer(NO_TOOLS).save_pretrained(tmp_path / "model")
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / SITE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.many_cases(3)
@pytest.mark.parametrize("parser", CALLS)
@pytest.mark.parametrize("agent", AGENTS)
def test_a_conversation_with_a_tool(agent: str, parser: str, folder: Path) -> None:
    """The system prompt shows schema and call, the call runs, and its result is a message of the user."""
    overrides = [*AGENTS[agent], f"parser={parser}", f"engine.call={json.dumps(CALLS[parser])}"]
    assert main(["rollout", "run.yaml", *overrides, "--out", "out"]) == 0

    (result,) = read_results(folder / "out")
    assert result.fault is None
    tokenizer = byte_tokenizer()
    (record,) = result.trajectories
    prompt, response = (tokenizer.decode(ids) for ids in (record.prompt_ids, record.response_ids))
    assert prompt.startswith("<|im_start|>system\n# Tools\n")
    assert '"name": "double"' in prompt.partition("<tools>\n")[2].partition("\n</tools>\n")[0]
    assert CALLS[parser].replace("21", "1") in prompt.partition("\n</tools>\n")[2]
    assert response == f"{CALLS[parser]}{RESULT}It is 42.<|im_end|>"
    sampled = record.response_ids[record.origins == Origin.ACTION]
    assert tokenizer.decode(sampled) == f"{CALLS[parser]}<|im_end|>It is 42.<|im_end|>"


def test_a_template_without_tools_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says so before a token is sampled, and names the option."""
    assert main(["rollout", "run.yaml", *AGENTS["tool_agent"], "chat.tools=template", "--out", "out"]) == 2

    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "tools are not shown; `chat: {name: jinja, tools: system_prompt}` writes them" in line


def test_an_outside_program_reads_why(folder: Path) -> None:
    """Its request with tools is refused with the same words."""
    assert main(["rollout", "run.yaml", *AGENTS["external"], "chat.tools=template", "--out", "out"]) == 1

    (result,) = read_results(folder / "out")
    assert result.fault is not None
    assert "`chat: {name: jinja, tools: system_prompt}` writes them into the system prompt" in str(result.fault)


@pytest.mark.parametrize(
    ("parser", "why"),
    [
        ("gpt_oss", "a model of the family gpt-oss needs `chat: harmony`, which shows tools in its own format"),
        ("null", "chat.tools: system_prompt needs a tool parser whose format is ordinary text"),
        ("auto", "parser: auto cannot tell the format of tool calls"),
    ],
)
def test_a_parser_without_a_text_is_refused(
    parser: str, why: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The format of gpt-oss is one of whole turns, and `auto` has nothing to read."""
    assert main(["plan", "run.yaml", *AGENTS["tool_agent"], f"parser={parser}"]) == 2
    assert why in capsys.readouterr().err


def test_demonstrations_have_the_ids_of_a_rollout(folder: Path) -> None:
    """`turnwise convert` with the config of the run writes the ids and the mask that the rollout recorded."""
    config = ["run.yaml", *AGENTS["tool_agent"]]
    assert main(["rollout", *config, "--out", "out"]) == 0
    assert main(["convert", "out", "--to", "openai", "--out", "tune.jsonl"]) == 0
    assert main(["convert", "tune.jsonl", "--to", "sft", "--out", "sft.parquet", "--config", *config]) == 0

    (result,) = read_results(folder / "out")
    (record,) = result.trajectories
    (row,) = pq.read_table(folder / "sft.parquet").to_pylist()
    assert record.input_ids.tolist() == row["input_ids"]
    sampled = [False] * record.num_prompt_tokens + (record.origins == Origin.ACTION).tolist()
    assert sampled == [bool(each) for each in row["loss_mask"]]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--to", "sft"], "--to sft needs --model, a model with a chat template, or --config"),
        (["--to", "sft", "--model", "model", "--config", "run.yaml"], "--to sft needs --model, a model"),
        (["--to", "atif", "--config", "run.yaml"], "--config is for sft, not for atif"),
        (["--to", "sft", "--config", "run.yaml", "--revision", "main"], "--revision is for sft with --model"),
        (["--to", "sft", "--config", "run.yaml", "model={}", "chat=null", "parser=null"], "the run has no model"),
    ],
)
def test_options_that_do_not_fit(
    arguments: list[str], why: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the option."""
    (folder / "tune.jsonl").write_text('{"messages": []}\n', encoding="utf-8")
    assert main(["convert", "tune.jsonl", *arguments, "--out", "sft.parquet"]) == 2
    assert why in capsys.readouterr().err
