"""Tasks and scores of reasoning-gym, through the source, the reward and the command line."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.cli import main
from turnwise.errors import DataError, InfrastructureError
from turnwise_reasoning_gym.answers import Answer, find_answer, is_same_number
from turnwise_reasoning_gym.processes import GymProcess
from turnwise_reasoning_gym.source import ReasoningGymSource
from turnwise_reasoning_gym.tagged_json import from_tagged, to_tagged
from turnwise_result_files import read_results

EXAMPLES = Path(__file__).parents[3] / "examples"
WITHOUT_REFERENCE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
LIST_NAMES = "import json, reasoning_gym.factory as f; print(json.dumps(sorted(f.DATASETS)))"
"""A program: reasoning-gym is not imported here, because its matplotlib warns."""
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.just("$tuple"), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(values)
def test_tagged_json_loses_nothing(value):
    """Also tuples, keys that are numbers, and texts that look like tags."""
    again = from_tagged(json.loads(json.dumps(to_tagged(value))))
    assert repr(again) == repr(value)


@pytest.mark.parametrize(
    ("text", "extraction", "expected"),
    [
        ("It is 5.", "auto", "It is 5."),
        ("<think>\n<answer>1</answer></think> 7\n", "auto", "7"),
        ("<answer>1</answer> no, <answer> 2\n</answer> yes", "auto", "2"),
        ("<answer>1</answer> no, <answer>2", "auto", "1"),
        ("It is 5.", "tag", ""),
        ("17 + 25 = 42.", "number", "42"),
        ("It costs -1,234.50 in all", "number", "-1234.50"),
        ("It is \N{MINUS SIGN}12.", "number", "-12"),
        ("<answer>\N{MINUS SIGN}1,200</answer>", "tag", "-1,200"),
        ("<answer>3 \N{MINUS SIGN} 1</answer>", "tag", "3 \N{MINUS SIGN} 1"),
        ("17-12 or (17)-12 or x-12", "number", "12"),
        ("17 - -12", "number", "-12"),
        ("5, 6, and", "number", "6"),
        ("1,2", "number", "2"),
        ("1,2345", "number", "2345"),
        ("about .5", "number", ".5"),
        ("none", "number", ""),
        ("<answer>3</answer>", "text", "<answer>3</answer>"),
        ("", "auto", ""),
    ],
)
def test_the_answer_is_found(text, extraction, expected):
    """In the last message of the model."""
    whole = extraction == "text" or (extraction == "auto" and "<answer>" not in text.rpartition("</think>")[2])
    assert find_answer(text, extraction) == Answer(expected, extracted=not whole)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=2), st.sampled_from(["{}", "{:,}", "{:+}", "{}0"]))
def test_a_number_is_found_however_it_is_written(number, form):
    """With separators, a sign, zeros at the end, and with the minus sign of print."""
    for text in (form.format(number), form.format(number).replace("-", "\N{MINUS SIGN}")):
        assert is_same_number(find_answer(f"It is {text}.", "number").text, str(number))
        assert is_same_number(find_answer(f"<answer>{text}</answer>", "tag").text, str(number))
        assert not is_same_number(text, str(number + 1))


@pytest.fixture(scope="module")
def names():
    """All data sets that a path can name."""
    done = subprocess.run([sys.executable, "-c", LIST_NAMES], capture_output=True, text=True, check=True)
    return sorted({*json.loads(done.stdout.splitlines()[-1])} - {"composite"})


@pytest.fixture(scope="module")
def rows(names):
    """Two rows of each data set, from JSON."""
    text = f"{','.join(names)}?size={2 * len(names)}&seed=5"
    return [json.loads(json.dumps(row)) for row in ReasoningGymSource().rows(text)]


@pytest.fixture
def score():
    """A function that scores an answer to a row."""
    with GymProcess("score", "60") as process:

        def score_one(row, answer, *, extracted=True):
            request = {"ground_truth": row["ground_truth"], "answer": answer, "extracted": extracted}
            return process.ask(row["reasoning_gym"] | request)["score"]

        yield score_one


@pytest.mark.slow
def test_reference_answers_score_one(names, rows, score):
    """In every data set that has them, from the JSON of a row; and another process makes the same rows."""
    scores = defaultdict(set)
    for row in rows:
        truth = row["ground_truth"]
        for extracted in (True, False):
            scores[row["data_source"]].add(None if truth is None else score(row, truth, extracted=extracted))

    assert len(names) >= 105
    assert {name: {None} if name in WITHOUT_REFERENCE else {1.0} for name in names} == scores
    assert rows == list(ReasoningGymSource().rows(f"{','.join(names)}?size={2 * len(names)}&seed=5"))


@pytest.mark.slow
def test_an_extracted_answer_has_no_share_of_the_right_one(rows, score):
    """In any data set: `15` is wrong where `5` is right, although it contains it."""
    paid = {}
    for row in rows:
        truth = row["ground_truth"]
        for answer in (f"1{truth}", f"{truth}1", f"-{truth}", f"x{truth}", f"{truth} {truth}") if truth else ():
            if score(row, answer) == len(truth) / len(answer) and not is_same_number(answer, truth):
                paid[row["data_source"]] = answer
    assert paid == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain_sum", "products", "basic_arithmetic", "gcd"])
def test_an_extracted_number_is_right_or_wrong(name, score):
    """However it is written; a whole message still has its share."""
    for row in ReasoningGymSource().rows(f"{name}?size=5&seed=1"):
        truth = row["ground_truth"]
        number = int(truth)
        assert {score(row, f"{number}"), score(row, f"{number:,}"), score(row, f"{number}.0")} == {1.0}
        wrong = (f"1{abs(number)}", f"{number}0", f"{-number}", f"{number}.5", f"The answer is {truth}")
        assert {score(row, answer) for answer in wrong} == {0.0}
        assert 0 < score(row, f"The answer is {truth}", extracted=False) < 1


@pytest.mark.slow
def test_the_config_of_a_task_reaches_its_score():
    """`puzzle24` accepts only the numbers and operators of its config."""
    row = next(iter(ReasoningGymSource().rows('puzzle24?size=1&operators=["+","-","*"]&max_value=6')))
    assert row["reasoning_gym"]["config"] == {"operators": {"$tuple": ["+", "-", "*"]}, "max_value": 6}


@pytest.mark.slow
def test_no_answer_is_right_in_every_data_set(rows, score):
    """A wrong answer pays nothing: not-a-number, another text, or a value of Python such as `None`."""
    paid = defaultdict(list)
    for row in rows:
        for answer in ("nan", "-NaN", "nan+nanj", "1+nani", "inf", "I do not know", "None", "[nan]"):
            if not 0 <= score(row, answer, extracted=False) < 0.5 and answer != row["ground_truth"]:
                paid[row["data_source"]].append(answer)
    assert paid == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "truth", "right", "wrong"),
    [
        ("game_of_life_halting", "True", ("True", "true", " True."), ("False", "no", "0", "True or False", "")),
        ("game_of_life_halting", "False", ("False", "FALSE"), ("True", "yes", "not False", "")),
        ("coin_flip", "0.003", ("0.003", "0.00304", "3/1000"), ("0", "0.", "0.0", "0.0035", "0.3", "nan", "inf", "")),
        ("coin_flip", "0.5", ("0.5", "1/2", ".5"), ("0", "5", "0.6", "0.45", "1/0", "half")),
    ],
)
def test_answers_of_data_sets_whose_score_is_replaced(name, truth, right, wrong, score):
    """Their own score pays wrong answers."""
    row = next(iter(ReasoningGymSource().rows(f"{name}?size=1"))) | {"ground_truth": truth}
    for extracted in (True, False):
        assert {answer: score(row, answer, extracted=extracted) for answer in right} == dict.fromkeys(right, 1.0)
        assert {answer: score(row, answer, extracted=extracted) for answer in wrong} == dict.fromkeys(wrong, 0.0)


def evaluated(code):
    """Return a request whose answer is the right one behind some code; its data set evaluates it, and then pays 0.1."""
    row = next(iter(ReasoningGymSource().rows("string_insertion?size=1")))
    answer = f"({code}, {row['ground_truth']!r})[1]"
    return row["reasoning_gym"] | {"ground_truth": row["ground_truth"], "answer": answer, "extracted": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "score"),
    [
        ("None", 0.1),
        ("__import__('time').sleep(0.4)", 0.1),  # as on a machine that is busy with other programs
        ("bytes(2**28)", 0.1),
        ("bytes(3 * 2**30)", 0.0),
        ("[bytes(2**28) for _ in range(12)]", 0.0),
    ],
)
def test_limits_of_time_and_memory(code, score):
    """Time is of the processor: an answer that waits loses nothing. The same process scores the next answer."""
    request = evaluated(code)
    with GymProcess("score", "0.2") as process:
        assert process.ask(request)["score"] == score
        first = process._process
        assert process.ask(evaluated("None"))["score"] == 0.1
        assert process._process is first


@pytest.mark.slow
def test_a_process_that_waits_for_ever_is_a_fault_of_the_machine():
    """Nobody knows whether the answer is right, so it has no score; the next answer has a new process."""
    with GymProcess("score", "0.2") as process:
        with pytest.raises(InfrastructureError, match="took more than 2 seconds and less than 0"):
            process.ask(evaluated("__import__('time').sleep(1000)"))
        assert process.ask(evaluated("None"))["score"] == 0.1


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("describe",), ("rows",), ("score", "1")])
def test_the_error_that_ends_a_process_is_named(arguments):
    """Also after the start, when what libraries print goes nowhere."""
    with (
        GymProcess(*arguments) as process,
        pytest.raises(InfrastructureError, match=r"ended with 1: (Type|Key)Error: "),
    ):
        process.ask({"nonsense": 1})


@pytest.mark.slow
def test_an_answer_without_end_scores_nothing_and_others_go_on():
    """A timer ends the process, and the next answer has a new one."""
    row = next(iter(ReasoningGymSource().rows("puzzle24?size=1")))
    request = row["reasoning_gym"] | {"ground_truth": row["ground_truth"], "answer": "9**9**9**9", "extracted": False}
    with GymProcess("score", "1") as process:
        with pytest.raises(TimeoutError):
            process.ask(request)
        assert process.ask(request | {"answer": row["ground_truth"]})["score"] == 1.0


@pytest.mark.slow
def test_an_answer_that_is_evaluated_does_no_harm(tmp_path):
    """It can write no file and start no program."""
    row = next(iter(ReasoningGymSource().rows("string_insertion?size=1")))
    with GymProcess("score", "10") as process:
        for code in (f"__import__('os').system('touch {tmp_path}/a')", f"open('{tmp_path}/b', 'w').write('x')"):
            request = {"ground_truth": row["ground_truth"], "answer": f"[{code}]", "extracted": False}
            assert process.ask(row["reasoning_gym"] | request)["score"] < 1.0
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists() or not (tmp_path / "b").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("gsm_symbolic?level=1", "data set 'gsm_symbolic' has no levels; leave out 'level'"),
        ("chain_sum?level=99", "option 'level' of chain_sum must be at most 10: 99"),
        ("chain_sum,chain_sum", "data set 'chain_sum' is there twice; for shares that differ, use data.sources"),
        ("chain_sum?min_terms=two", "option 'min_terms' of chain_sum must be of type int: 'two'"),
        ("chain_sum?min_terms=0", "options of chain_sum do not fit: min_terms must be positive"),
        ("chain_sum?size=0", "option 'size' must be an integer from 1: 0"),
        ("composite", "unknown data set 'composite'"),
    ],
)
def test_mistakes_are_one_line(text, error):
    """And they say what is allowed."""
    with pytest.raises(DataError) as caught:
        ReasoningGymSource().describe(text)
    assert str(caught.value).startswith(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        ("agent=single_turn", "tools=[]"),
        (),
        pytest.param(("runtime=ray", "runtime.reward_workers=1"), marks=pytest.mark.ray),
    ],
    ids=["single_turn", "tool_agent", "ray"],
)
def test_a_rollout_by_name(tmp_path, changes, capsys):
    """From the command line, with the tiny model and each agent, in one process and on Ray."""
    config = str(EXAMPLES / "calculator.yaml")
    path = "data.path=reasoning_gym:basic_arithmetic,gcd?size=4&seed=2"
    changes = (path, "data.limit=3", "reward=reasoning_gym", "rollout.n=2", "rollout.prompt_length=512", *changes)

    assert main(["rollout", config, *changes, "--out", str(tmp_path / "out")]) == 0, capsys.readouterr().err

    results = read_results(tmp_path / "out")
    assert {result.task.data_source for result in results} == {"basic_arithmetic", "gcd"}
    assert len(results) == 6
    assert all(result.reward is not None and 0 <= result.reward <= 1 for result in results)


@pytest.mark.slow
def test_a_plan_describes_the_tasks(capsys):
    """And a mistake is one line of the command."""
    config = str(EXAMPLES / "calculator.yaml")
    assert main(["plan", config, "data.path=reasoning_gym:gcd?size=7", "--placement-only", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"] == ["7 tasks of gcd of reasoning-gym, seed 0"]
    assert main(["plan", config, "data.path=reasoning_gym:gdc"]) == 2
    expected = "turnwise: error: reasoning_gym:gdc: unknown data set 'gdc'; did you mean 'gcd'?\n"
    assert capsys.readouterr().err == expected
