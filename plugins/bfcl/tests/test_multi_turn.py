"""Conversations about simulated programs: the leaderboard's wheel runs them and judges them."""

import asyncio
import importlib
import json
import os
import random
import signal
from collections import Counter

import pytest
from attrs import evolve
from bfcl_conversations import converse, resources, right_turns, tasks, to_call
from bfcl_inputs import written
from bfcl_original import importable

from turnwise import Resources, Status
from turnwise.cli import main
from turnwise.errors import DataError, InfrastructureError
from turnwise.tools.toolbox import ToolBox
from turnwise.types import ToolCall
from turnwise_bfcl import simulator
from turnwise_bfcl.calls import is_plain_call, write_call
from turnwise_bfcl.data_files import fetch_wheel
from turnwise_bfcl.multi_turn import CATEGORIES, PROGRAMS
from turnwise_bfcl.simulator import shared_simulator
from turnwise_bfcl.source import CATEGORIES as ALL_CATEGORIES
from turnwise_plain_functions import tool
from turnwise_result_files import read_results

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def wheel():
    """The leaderboard's wheel; without it these tests are skipped, and the summary says why."""
    try:
        return fetch_wheel()
    except DataError as error:
        pytest.skip(f"needs the wheel of bfcl-eval from the package index: {error}")


def scores(conversations):
    """Return the rewards of conversations, each given by a task and the turns of the model."""

    async def run():
        runs = [await converse(task, turns) for task, turns in conversations]
        assert [run.result.fault for run in runs] == [None] * len(runs)
        return [run.result.reward for run in runs]

    return asyncio.run(run())


def score(task, turns, parts=None, **options):
    """Return the result of one conversation, and its messages."""
    run = asyncio.run(converse(task, turns, parts, **options))
    return run.result, run.episode.messages


def mathematical():
    """Return a task with a file system and the functions of MathAPI."""
    return next(
        task
        for task in tasks("multi_turn_base")
        if {"MathAPI", "GorillaFileSystem"} <= {*task.extra["bfcl"]["entry"]["involved_classes"]}
    )


@pytest.mark.parametrize("category", CATEGORIES)
def test_right_calls_score_one(category):
    """In each task: all calls of a question in one turn, which keep their order."""
    found = scores((task, right_turns(task)) for task in tasks(category))
    assert (len(found), {*found}) == (200, {1.0})


def test_right_calls_in_turns_of_their_own_score_one():
    """A turn for each call."""
    assert {*scores((task, right_turns(task, at_once=False)) for task in tasks("multi_turn_base"))} == {1.0}


@pytest.mark.parametrize("category", CATEGORIES)
def test_no_call_scores_nothing(category):
    """The model answers each question without a call."""
    assert {*scores((task, ["Done."]) for task in tasks(category))} == {0.0}


def changed(answers, rng):
    """Return calls by turn with one change: a call is missing, twice, or in another turn, or two are exchanged."""
    turns = [list(turn) for turn in answers]
    at = rng.choice([number for number, turn in enumerate(turns) if turn])
    call = turns[at].pop(rng.randrange(len(turns[at])))
    kind = rng.randrange(4)
    if kind == 1:
        turns[at] += [call, call]
    if kind == 2:
        turns[rng.randrange(len(turns))].insert(0, call)
    if kind == 3:
        turns[at].insert(rng.randint(0, len(turns[at])), call)
    return turns


@pytest.mark.parametrize("category", CATEGORIES)
def test_verdicts_equal_the_verdicts_of_the_original(category, wheel, tmp_path):
    """On calls that lack, are twice, or come in another order or turn."""
    seen, differing = Counter(), []
    with importable(wheel, tmp_path):
        checker = importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker")
        utils = importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils")
        for task in tasks(category):
            turns = changed(task.ground_truth, random.Random(task.uid))
            steps = [[[write_call(*to_call(call)) for call in turn]] for turn in turns]
            theirs = checker.multi_turn_checker(
                steps, task.ground_truth, task.extra["bfcl"]["entry"], "", f"model_{category}"
            )["valid"]
            for name in [each for each in vars(utils) if each.endswith("_instance")]:
                delattr(utils, name)
            (ours,) = scores([(task, right_turns(evolve(task, ground_truth=turns)))])
            seen[theirs] += 1
            if ours != theirs:
                differing.append((task.uid, theirs, turns))
    assert differing == []
    assert min(seen[True], seen[False]) > 30


HOSTILE = {
    "wrong type": ("cd", {"folder": 3}),
    "missing": ("cd", {}),
    "unknown argument": ("cd", {"folder": "x", "force": True}),
    "code as a name": ("cd", {"folder=__import__('os').system('touch FILE') or ''": 1}),
    "code as a value": ("cd", {"folder": "') or __import__('os').system('touch FILE') or ('"}),
    "keyword": ("cd", {"class": "x"}),
    "state": ("cd", {"self": 1}),
    "empty name": ("cd", {"": 1}),
    "time": ("power", {"base": 10, "exponent": 10**12}),
    "digits": ("logarithm", {"value": 2, "base": 3, "precision": 10**10}),
    "root": ("square_root", {"number": 2, "precision": 10**18}),
    "long number": ("add", {"a": 10**4000, "b": 1}),
    "no number": ("add", {"a": float("nan"), "b": float("inf")}),
    "deep": ("mean", {"numbers": json.loads("[" * 300 + "]" * 300)}),
    "long": ("cd", {"folder": "x" * 200_000}),
    "surrogates": ("cd", {"folder": "\ud800\x00\n'\"\\"}),
    "private": ("_load_scenario", {"scenario": {}}),
    "exit": ("exit", {}),
    "builtin": ("eval", {"source": "1"}),
    "other program": ("post_tweet_of_nobody", {"content": "x"}),
}


@pytest.fixture
def short_limit(monkeypatch):
    """Processes that may compute for half a second."""
    monkeypatch.setattr(simulator, "CPU_S", 0.5)
    shared_simulator.cache_clear()
    yield
    shared_simulator.cache_clear()


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.usefixtures("short_limit")
def test_calls_that_cannot_run_are_texts(kind, tmp_path):
    """The model reads a text, nothing else happens, and the right calls after it score 1."""
    name, arguments = json.loads(json.dumps(HOSTILE[kind]).replace("FILE", str(tmp_path / "made")))
    task = mathematical()
    result, messages = score(task, [written((name, arguments)), *right_turns(task)])
    assert result.status is Status.COMPLETED, result.fault
    (text, *_) = [message["content"] for message in messages if message["role"] == "tool"]
    assert text
    assert "Traceback" not in text
    assert result.reward == 1.0
    assert not (tmp_path / "made").exists()


def test_a_call_beyond_the_limit_of_a_turn_does_not_count():
    """It has not run, so the model may make it again."""
    task = next(each for each in tasks("multi_turn_base") if len(each.ground_truth[0]) > 1)
    result, _ = score(task, right_turns(task), max_parallel_calls=1)
    assert result.reward == 0.0
    turns = []
    for calls in task.ground_truth:
        turns += [written(*map(to_call, calls[at:])) for at in range(len(calls))]
        turns.append("Done.")
    result, _ = score(task, turns, max_parallel_calls=1)
    assert result.reward == 1.0


def test_functions_that_the_prompt_withholds_come_with_a_question():
    """The prompt does not show them, the user's message does, and the model can call them in any turn."""
    for task in tasks("multi_turn_miss_func"):
        later = [schema["function"]["name"] for schema in task.extra["later_tools"]]
        shown = [schema["function"]["name"] for schema in task.extra["tools"]]
        (bringing,) = [text for text in task.extra["user_replies"] if "some more functions" in text]
        assert later
        assert not {*later} & {*shown}
        assert all(f'"name": "{name}"' in bringing for name in later)
    task = tasks("multi_turn_miss_func")[0]
    run = asyncio.run(converse(task, right_turns(task)))
    prompt = run.result.trajectories[0].prompt_ids
    assert '"name": "sort"' not in resources().chat.text(prompt)
    early = [right_turns(task)[0], written(("sort", {"file_name": "final_report.pdf"})), "Done."]
    run = asyncio.run(converse(task, early))
    texts = [message["content"] for message in run.episode.messages if message["role"] == "tool"]
    assert "Error" not in texts[-1]


def test_too_many_steps_score_nothing():
    """The leaderboard gives up after 20 turns with calls for one question."""
    task = mathematical()
    idle = written(("add", {"a": 1, "b": 1}))
    room = 20 - len(task.ground_truth[0])
    steps = right_turns(task, at_once=False)
    assert scores([(task, [idle] * room + steps), (task, [idle] * (room + 1) + steps)]) == [1.0, 0.0]


def test_a_conversation_that_is_cut_scores_nothing():
    """Although all of its calls are right."""
    task = mathematical()
    turns = right_turns(task)
    whole, _ = score(task, turns, max_assistant_turns=len(turns))
    cut, _ = score(task, turns, max_assistant_turns=len(turns) - 1)
    assert (whole.reward, cut.reward) == (1.0, 0.0)


def test_the_process_ends_with_a_run():
    """A worker that stops closes what its tools keep; the next run starts another process."""
    task = tasks("multi_turn_base")[0]
    for _ in range(2):
        assert scores([(task, right_turns(task))]) == [1.0]
        process = shared_simulator()._process
        asyncio.run(ToolBox(resources().tools.values()).close_kept())
        assert process.poll() is not None


def test_the_error_that_ends_the_process_is_named():
    """Also after the start, when what the programs print goes nowhere."""
    with pytest.raises(InfrastructureError, match="ended: 1 KeyError: 'involved_classes'"):
        asyncio.run(shared_simulator().ask({"entry": {}}))


def test_a_process_that_is_killed_costs_nothing():
    """Between any two calls: the next one has a new process with the same state."""
    task = mathematical()
    kill = shared_simulator()._ask

    def ask(line):
        answer = kill(line)
        os.kill(shared_simulator()._process.pid, signal.SIGKILL)
        shared_simulator()._process.wait()
        return answer

    shared_simulator()._ask = ask
    try:
        result, _ = score(task, right_turns(task))
    finally:
        shared_simulator()._ask = kill
    assert result.reward == 1.0


def test_a_suspended_episode_has_its_state_back():
    """From notes that are JSON."""
    task = tasks("multi_turn_base")[0]
    box = ToolBox(resources().tools)

    async def run():
        first = box.open_session(task, {})
        await first.call(ToolCall(name="cd", arguments={"folder": "document"}))
        notes = json.loads(json.dumps(await first.suspend()))
        second = box.open_session(task, notes)
        return (await second.call(ToolCall(name="pwd", arguments={}))).text

    assert "document" in asyncio.run(run())


def add(a: float, b: float) -> float:
    """
    Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


@pytest.mark.parametrize(
    ("changes", "truth", "error"),
    [
        ({"tools": {"add": tool(add)}}, None, "needs the programs of its conversation; set tools: [bfcl]"),
        ({"interaction": None}, None, "set interaction: scripted_user"),
        ({}, [["__import__('os').system('touch FILE')"]], "its ground_truth is no list of calls for each turn"),
        ({}, [["cd(folder=open('FILE', 'w'))"]], "its ground_truth is no list of calls for each turn"),
        ({}, "cd(folder='x')", "its ground_truth is no list of calls for each turn"),
        ({}, None, ""),
    ],
)
def test_episodes_that_cannot_be_judged_fail(changes, truth, error, tmp_path):
    """The run lacks a part, or a file with tasks brings code as its right calls."""
    task = mathematical()
    if truth is not None:
        task = evolve(task, ground_truth=json.loads(json.dumps(truth).replace("FILE", str(tmp_path / "made"))))
    result, _ = score(task, ["Done."], evolve(resources(), **changes))
    assert (result.status is Status.FAILED) == bool(error)
    if error:
        assert error in result.fault.message
    assert not (tmp_path / "made").exists()


def test_a_task_of_another_kind_fails():
    """The model reads nothing of it: one line names the task and the way out."""
    task = mathematical()
    result, _ = score(evolve(task, extra={"tools": task.extra["tools"]}), right_turns(task))
    assert (result.status, result.fault.owner) == (Status.FAILED, "infra")
    assert "is of no multi-turn category of BFCL; set data.path to bfcl:multi_turn_base" in result.fault.message


def first_answer(task):
    """Return calls of a task of one turn: its first possible answer, or else a call of each function that it shows."""
    return [
        (name, {key: values[0] for key, values in arguments.items() if values and values[0] != ""})
        for answer in task.ground_truth or [{schema["function"]["name"]: {}} for schema in task.extra["tools"]]
        for name, arguments in answer.items()
    ]


@pytest.mark.parametrize("category", [each for each in ALL_CATEGORIES if each not in CATEGORIES])
def test_tasks_of_one_turn_are_scored_beside_conversations(category):
    """A task may show a function with the name of a program's; its score equals the one of a run without programs."""
    alone = Resources(chat=resources().chat, parser=resources().parser)
    shared = [
        task
        for number, task in enumerate(tasks(category))
        if number < 2 or {schema["function"]["name"] for schema in task.extra["tools"]} & {*resources().tools}
    ]
    rewards = set()
    for task in shared:
        turns = [written(*first_answer(task))]
        beside, _ = score(task, turns)
        expected, _ = score(task, turns, alone)
        assert (beside.status, beside.fault) == (Status.COMPLETED, None), task.uid
        assert beside.reward == expected.reward, task.uid
        rewards.add(beside.reward)
    assert float("irrelevance" not in category) in rewards


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cd('x')", True),
        (" cd(folder='x') ", True),
        ("rm('x')", False),
        ("cd(cd('x'))", False),
        ("cd(**{'folder': 'x'})", False),
        ("cd(*['x'])", False),
        ("a.cd('x')", False),
        ("cd('x'); cd('y')", False),
        ("cd('x'", False),
        ("cd(" + "[" * 10_000, False),
        ("\0", False),
    ],
)
def test_plain_calls(text, expected):
    """Only these are evaluated."""
    assert is_plain_call(text, {"cd"}) is expected


def test_the_programs_are_known():
    """Each task has only these."""
    found = {name for task in tasks("multi_turn_base") for name in task.extra["bfcl"]["entry"]["involved_classes"]}
    assert found == {*PROGRAMS}


def test_a_run_by_name(tmp_path, capsys):
    """From the command line, with the tiny model, which ends each turn without a good call."""
    text = "bfcl:multi_turn_base,multi_turn_miss_param?size=4&seed=1"
    changes = [f"data.path={text}", "agent=tool_agent", "tools=[bfcl]", "interaction=scripted_user", "reward=bfcl"]
    more = ["rollout.prompt_length=65536", "rollout.n=1", "--out", str(tmp_path / "out")]
    assert main(["rollout", "examples/train_calculator.yaml", *changes, *more]) == 0, capsys.readouterr().err
    results = read_results(tmp_path / "out")
    assert [result.reward for result in results] == [0.0] * 4, [result.fault for result in results]
