"""`turnwise convert --to sft` with files that people have: each is read whole, or one line names its place."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from turnwise import ModelSpec
from turnwise.cli import main
from turnwise_calculator_demo import model_dir
from turnwise_chat_templates import load_chat
from turnwise_conversions import encode_demonstration

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "3"}
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
SCHEMA = {"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}
NO_CALL = "message 1 has a call without a name, or whose arguments are no JSON object"
NO_CONTENT = "content: expected a text or a list of typed parts, got null"


def line(*messages, **keys):
    return json.dumps({"messages": messages, **keys})


def answer(**keys):
    return line(USER, {**ANSWER, **keys})


def call(arguments, **keys):
    function = {"name": "calculator", "arguments": arguments}
    turn = {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
    return line(USER, turn, RESULT, ANSWER, **keys)


READ = {
    "a byte order mark": "\ufeff" + line(USER, ANSWER),
    "line breaks of Windows": f"{line(USER, ANSWER)}\r\n\r\n{line(USER, ANSWER)}\r\n",
    "an empty answer": answer(content=""),
    "spaces": answer(content="  b  \n"),
    "parts": line({"role": "user", "content": [{"type": "text", "text": "a"}]}, ANSWER),
    "a developer": line({"role": "developer", "content": "x"}, USER, ANSWER),
    "calls": call('{"expression": "1+2"}', tools=[SCHEMA]),
    "tools as text": call("{}", tools=json.dumps([SCHEMA])),
    "arguments as an object": call({"expression": "1+2"}),
    "empty arguments": call(""),
    "null arguments": call(None),
    "null calls": answer(tool_calls=None),
    "no calls": answer(tool_calls=[]),
    "no tools": line(USER, ANSWER, tools=None),
    "a null weight": answer(weight=None),
    "a weight": answer(weight=1),
    "ShareGPT": json.dumps({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}),
    "a prompt and a completion": json.dumps({"prompt": "a", "completion": "b"}),
    "messages of both": json.dumps({"prompt": [USER], "completion": [ANSWER]}),
    "keys of the API": line(USER, ANSWER, parallel_tool_calls=False, model="x"),
    "spelled special tokens": line({"role": "user", "content": "<|im_end|>"}, {**ANSWER, "content": "x<|im_end|>y"}),
}
REFUSED = {
    "an empty file": ("", "in.jsonl: holds no rows"),
    "blank lines": ("\n\n \n", "in.jsonl: holds no rows"),
    "no messages": (line(), "line 1: messages is empty"),
    "a null role": (line({"role": None, "content": "a"}, ANSWER), "messages[0].role: None is none of system"),
    "an unknown role": (line({"role": "human", "content": "a"}, ANSWER), "messages[0].role: 'human' is none of"),
    "a number as content": (line({"role": "user", "content": 3}, ANSWER), "messages[0].content: expected a text"),
    "no content": (line({"role": "user"}, ANSWER), f"messages[0].{NO_CONTENT}"),
    "an answer of null": (answer(content=None), f"messages[1].{NO_CONTENT}"),
    "an older call": (answer(content=None, function_call={"name": "f", "arguments": "{}"}), "messages[1]: function_c"),
    "older tools": (line(USER, ANSWER, functions=[{"name": "f"}]), "functions is an older form; use tools"),
    "an image": (
        line({"role": "user", "content": [{"type": "image_url"}]}, ANSWER),
        "a picture of a message needs the form",
    ),
    "a question at the end": (line(USER, ANSWER, USER), "ends with a message of the role assistant"),
    "two answers": (line(USER, ANSWER, ANSWER), "messages 1 and 2 are both of the role assistant"),
    "an answer at the start": (line(ANSWER, USER, ANSWER), "starts with a message of another role"),
    "cut arguments": (call('{"expr'), NO_CALL),
    "a list of arguments": (call("[1]"), NO_CALL),
    "a call without a function": (line(USER, {**ANSWER, "tool_calls": [{"id": "x"}]}, RESULT, ANSWER), NO_CALL),
    "calls as text": (answer(tool_calls="x"), "messages[1].tool_calls: expected a list of objects, got str"),
    "tools as a word": (line(USER, ANSWER, tools="x"), "tools: not JSON"),
    "a number as a tool": (line(USER, ANSWER, tools=[3]), "tools[0]: expected {"),
    "tools of another form": (line(USER, ANSWER, tools=[{"name": "f"}]), "tools[0]: expected {"),
    "a weight as text": (answer(weight="0"), "message 1: weight must be 0 or 1, not '0'"),
    "half a weight": (answer(weight=0.5), "message 1: weight must be 0 or 1, not 0.5"),
    "nothing to learn": (answer(weight=0), "no conversation has a turn to learn"),
    "half a character": (answer(content="\ud800"), "messages[1].content: the text holds half of a surrogate pair"),
    "NaN": (answer(weight=float("nan")), "messages[1].weight: nan is no JSON value"),
    "a repeated key": ('{"messages": [], "messages": []}', 'the key "messages" is given twice'),
    "a list": (f"[{line(USER, ANSWER)}]", "line 1: expected an object, got list"),
    "JSON on many lines": (json.dumps({"messages": [USER, ANSWER]}, indent=1), "line 1: invalid JSON"),
    "deep nesting": ("[" * 5000 + "]" * 5000, "nested too deeply"),
    "hidden reasoning": (answer(reasoning_content="why"), "message 1: the chat template does not write this turn"),
    "bytes of another encoding": (line(USER, ANSWER).encode("utf-16"), "line 1: not UTF-8"),
}


@pytest.fixture
def convert(tmp_path, capsys):
    """A function that converts a file and returns the exit code, the rows and standard error."""

    def run(content, name="in.jsonl"):
        source, out = tmp_path / name, tmp_path / "out.parquet"
        source.write_bytes(content if isinstance(content, bytes) else content.encode())
        code = main(["convert", str(source), "--to", "sft", "--model", str(model_dir()), "--out", str(out)])
        rows = pq.read_table(out).to_pylist() if out.exists() else None
        assert set(tmp_path.iterdir()) <= {source, out}
        return code, rows, capsys.readouterr().err

    return run


@pytest.mark.many_cases
@pytest.mark.parametrize("content", READ.values(), ids=READ)
def test_a_file_is_read(convert, content):
    """Each of its conversations is a row with tokens to learn."""
    code, rows, errors = convert(content)

    number = sum(bool(each.strip()) for each in content.splitlines())
    assert (code, len(rows)) == (0, number)
    assert all(any(row["loss_mask"]) for row in rows)
    assert errors.endswith(f"{number} of {number} written as sft\n")


@pytest.mark.many_cases
@pytest.mark.parametrize(("content", "text"), REFUSED.values(), ids=REFUSED)
def test_a_file_is_refused(convert, content, text):
    """In one line with the place, and nothing is written."""
    code, rows, errors = convert(content)

    assert (code, rows) == (2, None)
    assert errors.startswith("turnwise: error: ")
    assert text in errors
    assert errors.count("\n") == 1


def test_an_error_far_behind_leaves_nothing(convert):
    """Rows that were written before it are removed."""
    code, rows, errors = convert(f"{answer()}\n" * 300 + line(USER))

    assert (code, rows) == (2, None)
    assert "line 301: a demonstration ends with" in errors


def test_conversations_without_a_turn_to_learn_are_left_out(convert):
    """The last line counts them."""
    code, rows, errors = convert(f"{answer(weight=0)}\n{answer()}\n")

    assert (code, len(rows)) == (0, 1)
    assert "1 of 2 written as sft" in errors


def test_conversations_with_a_malformed_call_of_no_weight_are_left_out(convert):
    """The format `openai` writes the malformed calls of a model so; a malformed call to learn is refused."""
    lines = [json.loads(call('{"expr')), json.loads(answer())]
    lines[0]["messages"][1]["weight"] = 0
    code, rows, errors = convert("\n".join(map(json.dumps, lines)))

    assert (code, len(rows)) == (0, 1)
    assert "1 of 2 written as sft" in errors


def test_a_parquet_file_has_the_tokens_of_its_lines(convert, tmp_path):
    """An object of Parquet has the keys of all objects, with null where its own row lacks one."""
    lines = [call({"expression": "1+2"}, tools=[SCHEMA]), call({"other": 3}, tools=[SCHEMA]), answer()]
    chat = load_chat(ModelSpec(path=model_dir()))
    wanted = [json.loads(each) for each in lines]
    pq.write_table(pa.Table.from_pylist(wanted), tmp_path / "rows.parquet")

    code, rows, _errors = convert((tmp_path / "rows.parquet").read_bytes(), "rows.parquet")

    assert code == 0
    for row, each in zip(rows, wanted, strict=True):
        made = encode_demonstration(chat, each["messages"], each.get("tools", ()))
        assert row["input_ids"] == made.input_ids.tolist()


def test_a_json_list_is_read(convert):
    """As TRL's data sets and LLaMA-Factory have it."""
    code, rows, _errors = convert(json.dumps([{"messages": [USER, ANSWER]}] * 3), "in.json")

    assert (code, len(rows)) == (0, 3)
