"""Coding agents on real sessions: each repairs the repository of `examples/coding_cli` by its own tools."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve
from coding_model import CALLS, EDITS, CodingModel
from coding_sessions import PatientSessions, Wire, check_records, kinds

from turnwise import Status
from turnwise.errors import TemplateError
from turnwise_chat_templates.template import ChatTemplate
from turnwise_gateway.server import GatewayServer, ServerOptions, SessionDirectory
from turnwise_result_files import read_results
from turnwise_testing.engines.scripted import ScriptedEngine
from turnwise_testing.inputs.tokenizers import CHATML, byte_tokenizer
from turnwise_testing.probes.agent import probe_resources
from turnwise_testing.whole_runs.installation import install_plugin

ROOT = Path(__file__).parents[3]
STRICT = """\
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be at the beginning.') }}
    {%- endif %}
{%- endfor %}
"""
"""Start of a template that takes a system message at the start alone, as those of Qwen3.5 and later do."""

pytestmark = pytest.mark.slow


@pytest.fixture
def repair(path_of):
    """Runs an agent of the example in a separate episode; returns the episode and the output."""

    def run(cli, *, hold=None, chat=None):
        program = [sys.executable, str(ROOT / "examples/coding_cli/agent.py"), cli]
        environment = os.environ | {"PATH": f"{path_of(cli)}:{os.environ['PATH']}"}
        model, output = [], []

        def make_engine(probe):
            model.append(CodingModel(probe.chat, cli, hold))
            return model[0].engine()

        async def scenario(session):
            directory = SessionDirectory("tiny")
            key = directory.add("s-1", session)
            async with GatewayServer(directory, ServerOptions(heartbeat_s=0.05)) as server, Wire(server.port) as wire:
                url = f"http://127.0.0.1:{wire.port}/s/s-1"
                variables = {
                    "OPENAI_BASE_URL": f"{url}/v1",
                    "OPENAI_API_KEY": key,
                    "ANTHROPIC_BASE_URL": url,
                    "TURNWISE_MODEL": "tiny",
                    "CODING_CONTEXT": "500000",
                    "TURNWISE_TASK": json.dumps({"messages": [{"role": "user", "content": "Repair median.py."}]}),
                }
                process = await asyncio.create_subprocess_exec(
                    *program, env=environment | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
                async with asyncio.TaskGroup() as group:
                    cutting = group.create_task(wire.cut_after(model[0].held))
                    output.append((await process.communicate())[0].decode())
                    cutting.cancel()

        limits = {"prompt_length": 1 << 18}  # the tokenizer has a token for each byte
        done = PatientSessions(chat=chat).run(scenario, engine=make_engine, limits=limits)
        return done, output[0]

    return run


@pytest.mark.parametrize("cli", CALLS)
def test_an_agent_repairs_a_repository(repair, cli):
    """The agent's conversation of three turns is one record, and the test of the repository passes."""
    done, output = repair(cli)

    assert "TURNWISE_SCORE=1.0" in output
    assert Status.COMPLETED is done.result.status
    assert 1 == kinds(done).count("main"), done.counts
    assert {"main"} >= set(kinds(done)) - {"auxiliary"}, done.counts
    main = done.records[kinds(done).index("main")]
    assert 3 == len(main.turns())
    check_records(done)


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("cli", sorted(CALLS.keys() - {"mini"}))  # which asks for no stream
def test_an_agent_survives_a_cut_stream(repair, cli, turn):
    """After a stream that breaks the agent asks again: one record, and no token is trained twice."""
    done, output = repair(cli, hold=turn)

    assert "TURNWISE_SCORE=1.0" in output
    assert 1 == kinds(done).count("main"), done.counts
    assert {"main"} >= set(kinds(done)) - {"auxiliary"}, done.counts
    assert 3 == len(done.records[kinds(done).index("main")].turns())
    check_records(done)


@pytest.mark.parametrize("hold", [None, 1])
@pytest.mark.parametrize("cli", EDITS)
def test_an_agent_without_tools_repairs_a_repository(repair, cli, hold):
    """It shows the file anew in each request, so each turn has a record; a turn with a cut stream is in none."""
    done, output = repair(cli, hold=hold)

    assert "TURNWISE_SCORE=1.0" in output
    assert Status.COMPLETED is done.result.status
    assert ["main"] * 3 == kinds(done), done.counts
    assert [1, 1, 1] == [len(record.turns()) for record in done.records]
    check_records(done)


def test_claude_code_runs_with_a_template_that_has_one_system_message(repair):
    """Claude Code puts system messages inside the conversation; they become texts of the user, in one record."""
    chat = ChatTemplate(byte_tokenizer(STRICT + CHATML))
    with pytest.raises(TemplateError, match="System message must be at the beginning"):
        chat.prompt([{"role": "user", "content": "Hi."}, {"role": "system", "content": "Be brief."}])

    done, output = repair("claude", chat=chat)

    assert "TURNWISE_SCORE=1.0" in output
    assert ["main"] == [kind for kind in kinds(done) if kind != "auxiliary"]
    main = done.records[kinds(done).index("main")]
    assert 3 == len(main.turns())
    text = chat.text(main.input_ids[: main.num_prompt_tokens])
    assert (1, True) == (text.count("<|im_start|>system"), text.count("<|im_start|>user") > 1)
    check_records(done)


def configure_tools(cli, home, url, key):
    """Return the command and the environment of an agent with the tools of the run, and nothing else of a user's."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", "OPENAI_API_KEY": key}
    if cli == "claude":
        server = {"type": "http", "url": f"{url}/mcp", "headers": {"Authorization": f"Bearer {key}"}}
        environment |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": key, "ANTHROPIC_MODEL": "tiny"}
        environment |= {"ANTHROPIC_SMALL_FAST_MODEL": "tiny", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
        allowed = ["--allowedTools", "mcp__run__add", "--mcp-config", json.dumps({"mcpServers": {"run": server}})]
        return ["claude", *allowed, "--print"], environment
    provider = f'name = "run"\nbase_url = "{url}/v1"\nenv_key = "OPENAI_API_KEY"\nwire_api = "responses"'
    (home / ".codex").mkdir()
    (home / ".codex/config.toml").write_text(
        'model = "tiny"\nmodel_provider = "run"\nmodel_context_window = 500000\n'
        f"[model_providers.run]\n{provider}\n"
        f'[mcp_servers.run]\nurl = "{url}/mcp"\nbearer_token_env_var = "OPENAI_API_KEY"\n'
    )
    return ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"], environment


@pytest.mark.parametrize("cli", ["claude", "codex"])
def test_an_agent_calls_a_tool_of_the_run(path_of, tmp_path, cli):
    """The agent's model calls a tool of the run over the Context Protocol, and reads its result."""
    folder = path_of(cli)

    def make_engine(probe):
        encode, stop = probe.chat.tokenizer.encode, probe.chat.stop_token_ids[0]
        call = json.dumps({"name": "mcp__run__add", "arguments": {"a": 2, "b": 3}})
        (tag,) = encode("<tool_response>")

        def choose(request):
            has_result = (request.token_ids == tag).any()
            return [*encode("It is 5." if has_result else f"<tool_call>\n{call}\n</tool_call>"), stop]

        return ScriptedEngine(choose)

    async def scenario(session):
        session.parts = evolve(session.parts, tools=probe_resources().tool_schemas)
        directory = SessionDirectory("tiny")
        key = directory.add("s-1", session)
        async with GatewayServer(directory) as server:
            (name, *arguments), environment = configure_tools(cli, tmp_path, server.url("s-1"), key)
            process = await asyncio.create_subprocess_exec(
                folder / name,
                *arguments,
                "Add 2 and 3.",
                cwd=tmp_path,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            output, _ = await process.communicate()
            assert "It is 5." in output.decode()

    done = PatientSessions().run(scenario, engine=make_engine, limits={"prompt_length": 1 << 18})

    assert 1 == done.result.metrics.num_tool_calls
    assert ["main"] == kinds(done)
    result = done.result.messages[-2]
    assert ("tool", "5") == (result["role"], result["content"].splitlines()[-1])


def test_the_example_is_a_rollout(path_of, tmp_path):
    """`turnwise rollout` runs the example with pi and the scripted model: one trained record, and the score 1."""
    byte_tokenizer().save_pretrained(tmp_path / "model")
    install_plugin(tmp_path / "plugins", "coding_plugin", "from coding_model import register_engines\n")
    overrides = [
        f"model.path={tmp_path / 'model'}",
        "engine.name=coding_model",
        "agent.command=[python, examples/coding_cli/agent.py, pi]",
        "agent.environment.CODING_CONTEXT='500000'",  # the tokenizer has a token for each byte
        "rollout.n=1",
        "rollout.prompt_length=100000",
    ]
    paths = [str(tmp_path / "plugins"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "turnwise.cli", "rollout", "examples/coding_cli/rollout.yaml"]
    done = subprocess.run(
        [*command, *overrides, "--out", str(tmp_path / "out")],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{path_of('pi')}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert 0 == done.returncode, done.stderr[-3000:]
    (episode,) = read_results(tmp_path / "out")
    assert (Status.COMPLETED, ["main"]) == (episode.status, [each.kind for each in episode.lineage])
    assert [1.0] == [score.value for score in episode.scores]
