"""Tests of the agent `external`: programs and functions, their ends, and equality with an agent in the process."""

import asyncio
import json
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from attrs import evolve
from gateway_rollouts import start_rollout, wait_until, write_rollout

from turnwise import Resources, Status
from turnwise.errors import ConfigError
from turnwise_gateway import make_external
from turnwise_gateway.agents.agent import show_task
from turnwise_gateway.config import ExternalConfig
from turnwise_gateway.programs.program import INHERITED
from turnwise_result_files import read_results
from turnwise_testing.probes.agent import AgentProbe, make_task, probe_resources
from turnwise_tool_parsers.think_tags import ThinkTags, ThinkTagsConfig

pytestmark = pytest.mark.usefixtures("starts_a_process")

PROGRAMS = Path(__file__).parent / "programs"
CLIENT = {"OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_AUTH_TOKEN"}
CLIENT |= {"TURNWISE_AGENT", "TURNWISE_MODEL", "TURNWISE_MCP_URL", "TURNWISE_TASK"}
CALLING = (
    "The answer is 42.",
    'First I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'
    '<tool_call>{"name": "add", "arguments": {"a": 5, "b": 8}}</tool_call>',
    "<think>Nothing to add.</think>Grüße, 世界: no call here.",
)


def build_probe(turns=CALLING, **options):
    """Return a probe of the agent with these options."""
    resources = probe_resources()
    config = ExternalConfig(**options)
    return AgentProbe(
        make_agent=lambda: make_external(config, resources), resources=resources, turns=turns, response_length=1 << 14
    )


def program(behaviour, *arguments, **options):
    """Return a probe of the plain program."""
    command = (sys.executable, str(PROGRAMS / "call_plainly.py"), behaviour, *map(str, arguments))
    return build_probe(command=command, **options)


def run(probe, number=0, **options):
    return asyncio.run(probe.run(make_task(number), **options))


def test_a_program_that_reports_a_score_completes():
    """A program finds the model in its environment, and the score that it prints is noted."""
    done = run(program("score"))

    assert Status.COMPLETED is done.result.status
    assert 0.75 == done.episode.memory["reported_score"]
    assert 1 == len(done.result.trajectories[0].turns())


def test_a_program_that_ends_after_the_last_byte_has_its_turn(busy_server):
    """A program that reads the reply, reports a score and ends has a trained turn, however busy the server is."""
    done = run(program("score"))

    assert Status.COMPLETED is done.result.status
    assert (True,) == done.result.trained
    assert [1] == [len(record.turns()) for record in done.result.trajectories]


@pytest.mark.parametrize(
    ("inherit", "names"),
    [((), set()), (("HF_TOKEN", "NOT_SET"), {"HF_TOKEN"}), ("all", {"HF_TOKEN", "TURNWISE_CONTROL_SECRET"})],
)
def test_a_program_gets_no_secret_of_the_worker(inherit, names, monkeypatch, tmp_path):
    """It has what programs need to run, its client's variables, those of the config, and those named in `inherit`."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("TURNWISE_CONTROL_SECRET", "secret")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    file = tmp_path / "environment.json"

    done = run(program("environment", file, environment={"OWN": "1"}, inherit=inherit))

    assert Status.COMPLETED is done.result.status
    found = json.loads(file.read_text())
    assert names == {name for name, value in found.items() if value == "secret"}
    assert {"PATH", "LC_ALL", "https_proxy", "no_proxy", "OWN", "OPENAI_API_KEY", "TURNWISE_TASK"} <= found.keys()
    assert inherit == "all" or found.keys() <= {*INHERITED, *CLIENT, *names, "LC_ALL", "LC_CTYPE", "OWN"}


@pytest.mark.slow
@pytest.mark.parametrize(("inherit", "is_there"), [("[ACME_TOKEN]", True), ("all", True), ("[]", False)])
def test_inherited_variables_in_a_config(inherit, is_there, tmp_path, monkeypatch):
    """The option in a file of a config is a list of names, or the word `all`."""
    monkeypatch.setenv("ACME_TOKEN", "secret")
    value = yaml.safe_load(inherit)
    command = ["python", str(PROGRAMS / "call_plainly.py"), "environment", str(tmp_path / "environment.json")]
    write_rollout(tmp_path, 1, {"command": command, "inherit": value}, max_in_flight=1)

    with start_rollout(tmp_path, "run.yaml", "--out", "out") as process:
        assert process.wait(600) == 0, (tmp_path / "log").read_text()

    assert ("ACME_TOKEN" in json.loads((tmp_path / "environment.json").read_text())) == is_there


def test_a_score_without_a_turn_is_the_agents_failure():
    """An agent that reports a score and has read no token of the model fails, with the last refusal."""
    done = run(build_probe(function="gateway_agents:swallow"))

    assert (Status.FAILED, "agent") == (done.result.status, done.result.fault.owner)
    assert "no call was served; the last one was refused: 'stop' is not supported" in done.result.fault.message
    assert done.result.reward is None


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        (False, "RefusedError: no idea; no call was served; the last one was refused: 'n' is not supported"),
        (True, "RefusedError: no idea; the last call was refused: 'n' is not supported"),
    ],
)
def test_a_failure_after_a_refusal_names_it(served, expected):
    """The fault of an agent that fails has its own error and the refusal that it may come from."""
    probe = build_probe(function="gateway_agents:fail_after_a_refusal")
    done = asyncio.run(probe.run(evolve(make_task(), extra={"served": served})))

    assert (Status.FAILED, "agent") == (done.result.status, done.result.fault.owner)
    assert expected in done.result.fault.message


@pytest.mark.parametrize("parser", [None, ThinkTags(ThinkTagsConfig())])
def test_a_reasoning_parser_splits_the_reply(parser):
    """With a reasoning parser of the run, the reply has the reasoning apart; without one it stays in the text."""
    resources = evolve(probe_resources(), reasoning_parser=parser)
    config = ExternalConfig(function="gateway_agents:converse")
    probe = evolve(
        build_probe(("<think>Hm.</think>Yes.",), function="gateway_agents:converse"),
        make_agent=lambda: make_external(config, resources),
    )
    reply = run(probe).result.messages[-1]

    assert (
        ("Yes.", "Hm.") == (reply["content"], reply["reasoning_content"]) if parser else "<think>" in reply["content"]
    )


@pytest.mark.parametrize(("text", "score"), [("1", 1.0), (" -2.5e-1", -0.25), (".5", 0.5)])
def test_numbers_of_programs_are_scores(text, score):
    """A score may be any decimal number."""
    assert score == run(program("report", text)).episode.memory["reported_score"]


@pytest.mark.parametrize("text", ["1_0.5", "1e308", "9" * 400, "nan", "inf", "0x1", "", "\uff11"])
def test_a_score_that_is_none_is_the_agents_failure(text):
    """A text that is no number, or a number that no record can hold, fails the episode when it is reported."""
    done = run(program("report", text))

    assert (Status.FAILED, "agent") == (done.result.status, done.result.fault.owner)
    assert "reported the score" in done.result.fault.message
    assert "reported_score" not in done.episode.memory


def test_an_exit_code_is_the_agents_failure():
    """Another exit code than 0 fails the episode with the last lines of standard error, and keeps the record."""
    done = run(program("exit"))

    assert (Status.FAILED, "agent") == (done.result.status, done.result.fault.owner)
    assert "exit code 3 the last line" in done.result.fault.message
    assert 1 == len(done.result.trajectories[0].turns())


def test_a_killed_program_is_the_agents_failure():
    """A program that dies of SIGKILL fails its episode, with its turns kept."""
    done = run(program("kill"))

    assert (Status.FAILED, "agent") == (done.result.status, done.result.fault.owner)
    assert "signal 9" in done.result.fault.message
    assert 1 == len(done.result.trajectories[0].turns())


def is_running(pid):
    """Return whether a process exists and is no zombie."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def test_children_that_left_the_group_end_with_the_program(tmp_path):
    """A child in a separate session is killed at the end of the episode, and the episode is completed."""
    done = run(program("detached", tmp_path / "pid"))

    assert Status.COMPLETED is done.result.status
    pid = int((tmp_path / "pid").read_text())
    # The signal is sent when the episode ends; a busy system takes a moment to end the process.
    wait_until(lambda: not is_running(pid), lambda: f"process {pid} runs")


def test_an_agent_that_never_calls_is_not_waited_for():
    """A limit until the first call ends a silent agent, and no agent that has called."""
    silent = run(build_probe(command=("sleep", "600"), start_s=0.3))
    calls = run(program("score", start_s=60.0))

    assert Status.TIMED_OUT is silent.result.status
    assert "no call in its first 0.3 s" in silent.result.fault.message
    assert Status.COMPLETED is calls.result.status


def test_children_end_with_the_program(tmp_path):
    """A process that the program leaves behind is killed with it."""
    done = run(program("child", tmp_path / "pid"))

    assert Status.COMPLETED is done.result.status
    pid = int((tmp_path / "pid").read_text())
    # The signal is sent when the episode ends; a busy system takes a moment to end the process.
    wait_until(lambda: not is_running(pid), lambda: f"process {pid} runs")


def test_a_silent_program_ends_after_its_idle_time():
    """A program without calls ends as timed out, and is killed."""
    done = run(program("silence", idle_s=0.3))

    assert Status.TIMED_OUT is done.result.status
    assert "made no call for 0.3 s" in done.result.fault.message


def test_an_attempt_has_a_deadline():
    """`session_s` bounds the whole attempt."""
    done = run(program("silence", session_s=1.0))

    assert Status.TIMED_OUT is done.result.status
    assert "took longer than 1.0 s" in done.result.fault.message


def test_a_runaway_program_ends_by_its_budget():
    """A program that never stops calling is refused, killed, and its episode truncated."""
    for exit_grace_s in (0.2, 2.0, 30.0):  # the first in which a busy machine makes another call
        done = run(program("runaway", max_calls=5, exit_grace_s=exit_grace_s))
        if "gateway/refused_budget_exhausted" in done.result.metrics.extra:
            break

    assert Status.TRUNCATED is done.result.status
    assert 5 == sum(len(record.turns()) for record in done.result.trajectories)
    assert 0 < done.result.metrics.extra["gateway/refused_budget_exhausted"]


def test_a_program_that_cannot_start_is_the_machines_failure():
    """A missing program is a fault of the machine, and never one of the model."""
    done = run(build_probe(command=("/no/such/program",)))

    assert (Status.FAILED, "infra") == (done.result.status, done.result.fault.owner)


def test_a_task_that_no_variable_holds():
    """The fault has the limit, and names the option that takes more."""
    probe = program("score")
    task = make_task(messages=({"role": "user", "content": "é" * 70_000},))
    done = asyncio.run(probe.run(task))

    assert Status.FAILED is done.result.status
    assert "and TURNWISE_TASK holds 131057: agent.function takes more" in done.result.fault.message


def test_an_agent_without_a_call_failed():
    """An agent that never asks the model has failed."""
    done = run(build_probe(function="gateway_agents:be_silent"))

    assert (Status.FAILED, "agent") == (done.result.status, done.result.fault.owner)
    assert "without a call" in done.result.fault.message


def test_a_score_that_is_no_number_is_refused():
    """A score that is not finite fails the episode and is not noted."""
    done = run(build_probe(function="gateway_agents:report_nonsense"))

    assert (Status.FAILED, "agent") == (done.result.status, done.result.fault.owner)
    assert "reported_score" not in done.episode.memory


def run_both(probe, inside, number):
    """Run a task through the gateway and in the process; return both."""
    return run(probe, number), run(inside, number)


def inside_probe(probe):
    """Return a probe of `tool_agent` with the same model."""
    from importlib import import_module

    tool_agent = import_module("turnwise_tool_agent")
    config = import_module("turnwise_tool_agent.config").ToolAgentConfig(max_parallel_calls=8)
    return evolve(probe, make_agent=lambda: tool_agent.make_tool_agent(config, probe.resources))


def check_equal(outside, inside):
    assert inside.result.status is outside.result.status
    assert inside.records == outside.records
    assert [plain(message) for message in inside.result.messages] == [
        plain(message) for message in outside.result.messages
    ]
    answers = [[answer.token_ids.tolist() for answer in each.answers] for each in (inside, outside)]
    assert answers[0] == answers[1]


def plain(message):
    """Return the parts of a message that both agents write."""
    content = message["content"]
    calls = [call["function"] | {"id": call["id"]} for call in message.get("tool_calls", ())]
    return message["role"], content, [{**c, "arguments": json.loads(c["arguments"])} for c in calls]


@pytest.mark.parametrize("number", range(12))
def test_the_gateway_equals_an_agent_in_the_process(number):
    """A run through the gateway equals the same run of `tool_agent`, token for token, with the same seeds."""
    probe = build_probe(function="gateway_agents:converse")
    check_equal(*run_both(probe, inside_probe(probe), number))


@pytest.mark.parametrize(("number", "expected"), [(0, (2, 0)), (1, (0, 0))])
def test_conversations_are_compared_with_the_template(number, expected):
    """Both conversations of a program, in the first of 64 episodes."""
    done = run(build_probe(CALLING[1:], function="gateway_agents:converse_twice"), number)

    metrics = done.result.metrics.extra
    assert expected == tuple(metrics.get(f"template/{name}_conversations", 0) for name in ("compared", "differing"))


def test_the_openai_client_equals_an_agent_in_the_process():
    """A program with the `openai` client gives the records of `tool_agent`, token for token."""
    tools = json.dumps([dict(schema) for schema in probe_resources().tool_schemas])
    probe = build_probe(command=(sys.executable, str(PROGRAMS / "call_openai.py")), environment={"TOOLS": tools})
    outside, inside = run_both(probe, inside_probe(probe), 1)

    check_equal(outside, inside)
    assert 1 < len(outside.result.trajectories[0].turns())
    assert 0.25 == outside.episode.memory["reported_score"]


def test_many_programs_share_a_server():
    """Episodes at once have separate sessions on one server, which is gone after the last."""
    probe = build_probe(function="gateway_agents:converse")
    agent = probe.make_agent()

    async def run_all():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(probe.run(make_task(number), agent=agent)) for number in range(8)]
        assert agent._host._servers.num_open == 0
        return [task.result() for task in tasks]

    alone = [run(probe, number) for number in range(8)]
    for one, expected in zip(asyncio.run(run_all()), alone, strict=True):
        assert expected.records == one.records


def test_the_task_has_no_answer():
    """A program sees the task without its ground truth."""
    task = make_task(ground_truth="42", extra={"a": 1})

    assert {"uid": task.uid, "messages": list(task.messages), "extra": {"a": 1}} == show_task(task)


@pytest.mark.parametrize("options", [{}, {"command": ("a",), "function": "a:b"}, {"function": "a"}])
def test_there_is_one_agent(options):
    """The config names a program or a function, and not both."""
    with pytest.raises(ValueError, match=r"one of command|module:name"):
        ExternalConfig(**options)


def test_a_missing_function_is_named():
    """A function that cannot be imported stops the run with its name."""
    with pytest.raises(ConfigError, match="no_such_module:agent"):
        make_external(ExternalConfig(function="no_such_module:agent"), probe_resources())


def test_a_run_without_a_template_is_refused():
    """The agent renders prompts, so it needs a chat template."""
    with pytest.raises(ConfigError, match="chat template"):
        make_external(ExternalConfig(command=("true",)), Resources())


@pytest.mark.slow
def test_programs_without_descriptors_wait(tmp_path):
    """Under a hard limit that is too small for all programs at once, the others wait, and all episodes are complete."""
    command = ["python", str(PROGRAMS / "call_plainly.py"), "score"]
    write_rollout(tmp_path, 6, {"command": command}, max_in_flight=6)
    limited = ["sh", "-c", 'ulimit -n 276; exec "$@"', "sh"]  # 256 for everything else, and three programs

    with start_rollout(tmp_path, "run.yaml", "--out", "out", before=limited) as process:
        assert process.wait(600) == 0, (tmp_path / "log").read_text()

    log = (tmp_path / "log").read_text()
    assert [Status.COMPLETED] * 6 == [result.status for result in read_results(tmp_path / "out")], log
    assert 1 == log.count("programs of agents wait for each other")
    assert '"programs_at_once": 3' in log
