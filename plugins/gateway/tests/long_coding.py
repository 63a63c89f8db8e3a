"""
Long runs of coding agents: a scripted model that works for thirty turns, and how each agent is started.

The model starts a sub-agent, calls two tools at once, and reads a long text, after which the agent asks for a summary.
"""

import asyncio
import json

import numpy as np
from attrs import define, field, frozen

from turnwise_testing.engines.scripted import ScriptedEngine

NUM_STEPS = 30
SPAWNING, PARALLEL, LONG = 6, 8, 16
"""Numbers of the steps that start a sub-agent, call two tools, and print a long text."""
TASK = "MAIN-TASK: do what is needed."
GO_ON = "MAIN-TASK: go on."
PART = "SUB-TASK: tell the first line of notes.txt."
ANSWER, PART_ANSWER = "All of the work is done.", "The first line is one."
SUMMARY = """\
<analysis>
I looked at all of it.
</analysis>

<summary>
The results so far are known, and nothing is missing.
<state_snapshot>The notes have two lines.</state_snapshot>
</summary>"""


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@frozen(kw_only=True)
class LongAgent:
    """
    A coding agent that works for long.

    Attributes:
        shell: returns the call of its tool for commands.
        spawn: calls that start a sub-agent and wait for it, a turn each.
        asks: start of its request for a summary.
        configure: writes its files into a home, and returns its environment.
        start: the command of a run, without the task.
        resume: the command that continues the last run, without the text.
        auxiliary: kinds of its records besides those of the work.
        forks: reasons for which it opens records, because it shows a conversation otherwise from then on.
    """

    shell: object
    spawn: tuple[str, ...]
    asks: str
    configure: object
    start: tuple[str, ...]
    resume: tuple[str, ...]
    auxiliary: tuple[str, ...] = ()
    forks: frozenset[str] = frozenset()

    def steps(self):
        """Return the calls of each step."""
        steps = [self.shell(f"echo result-{number}") for number in range(1, NUM_STEPS + 1)]
        steps[SPAWNING - 1 : SPAWNING - 1 + len(self.spawn)] = self.spawn
        steps[PARALLEL - 1] += "\n" + self.shell("wc notes.txt")
        # Qwen Code may lose the output of a command that ends at once.
        steps[LONG - 1] = self.shell("seq 1 6000; sleep 1")
        return steps


def configure_claude(_home, url, key):
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": key,
        "ANTHROPIC_MODEL": "claude-sonnet-4-5",  # it summarises only for models whose context it knows
        "ANTHROPIC_SMALL_FAST_MODEL": "claude-sonnet-4-5",
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "200000",
        "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "72",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    }


def configure_codex(home, url, key):
    lines = [
        'model = "tiny"',
        "model_context_window = 120000",
        "model_auto_compact_token_limit = 45000",
        'model_provider = "run"',
        "[model_providers.run]",
        'name = "run"',
        f'base_url = "{url}/v1"',
        'env_key = "OPENAI_API_KEY"',
        'wire_api = "responses"',
        "[features]",
        "multi_agent_v2 = true",
    ]
    write(home / ".codex/config.toml", "\n".join(lines))
    return {"OPENAI_API_KEY": key}


def configure_opencode(_home, url, key):
    models = {"tiny": {"name": "tiny", "limit": {"context": 44000, "output": 4096}}}
    provider = {"npm": "@ai-sdk/openai-compatible", "models": models}
    provider["options"] = {"baseURL": f"{url}/v1", "apiKey": key}
    names = {"model": "run/tiny", "small_model": "run/tiny"}
    config = {"provider": {"run": provider}, "share": "disabled", "permission": "allow", **names}
    quiet = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config), **quiet}


def configure_qwen(home, url, key):
    model = {
        "name": "tiny",
        "generationConfig": {"contextWindowSize": 130000},
        "chatCompression": {"contextPercentageThreshold": 0.7},
    }
    write(home / ".qwen/settings.json", json.dumps({"model": model, "general": {"enableAutoUpdate": False}}))
    return {"OPENAI_API_KEY": key, "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_MODEL": "tiny"}


def write(path, text):
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")


_CLAUDE = ("claude", "--permission-mode", "bypassPermissions", "--print")
_CODEX = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
_QWEN = ("qwen", "--yolo", "--auth-type", "openai")

AGENTS = {
    "claude": LongAgent(
        shell=lambda command: call("Bash", command=command, description="Say."),
        spawn=(call("Agent", description="Part.", prompt=PART, subagent_type="general-purpose"),),
        asks="Your task is to create a detailed summary",
        configure=configure_claude,
        start=_CLAUDE,
        resume=(*_CLAUDE, "--continue"),
        forks=frozenset({"inside"}),  # a summary is asked for without the reminders in the conversation
    ),
    "codex": LongAgent(
        shell=lambda command: call("exec_command", cmd=command, max_output_tokens=40000),
        spawn=(
            call("collaboration__spawn_agent", task_name="part", message=PART, fork_turns="none"),
            call("collaboration__wait_agent", timeout_ms=60000),
        ),
        asks="You are performing a CONTEXT CHECKPOINT COMPACTION",
        configure=configure_codex,
        start=("codex", "exec", *_CODEX),
        resume=("codex", "exec", "resume", "--last", *_CODEX),
        forks=frozenset({"tools"}),  # a summary is asked for without the tools
    ),
    "opencode": LongAgent(
        shell=lambda command: call("bash", command=command, description="Say."),
        spawn=(call("task", description="Part.", prompt=PART, subagent_type="general"),),
        asks="anchored summary",
        configure=configure_opencode,
        start=("opencode", "run"),
        resume=("opencode", "run", "--continue"),
        auxiliary=("auxiliary",),  # the title
    ),
    "qwen": LongAgent(
        shell=lambda command: call("run_shell_command", command=command, is_background=False),
        spawn=(call("agent", description="Part.", prompt=PART, subagent_type="general-purpose"),),
        asks="First, reason in your <analysis> block",
        configure=configure_qwen,
        start=_QWEN,
        resume=(*_QWEN, "--continue"),
    ),
}


@define(eq=False)
class LongModel:
    """
    Works through the steps of an agent, and answers its other requests.

    Attributes:
        chat: of the run; its tokenizer has a token for each byte.
        agent: that it works for.
        holds: numbers of the steps whose first request gets no answer before it is cancelled.
        held: set when such a request is there, one for each.
        num_steps: steps so far.
    """

    chat: object
    agent: LongAgent
    holds: tuple[int, ...] = ()
    held: dict[int, asyncio.Event] = field(init=False)
    num_steps: int = field(default=0, init=False)
    _answers: dict[bytes, str] = field(factory=dict, init=False)
    _steps: list[str] = field(init=False)
    _num_parts: int = field(default=0, init=False)

    def __attrs_post_init__(self):
        self.held = {number: asyncio.Event() for number in self.holds}
        self._steps = self.agent.steps()

    def engine(self):
        return ScriptedEngine(self.choose, latency_s=self.wait)

    def wait(self, request):
        """Return the seconds before a turn."""
        event = self.held.get(self.num_steps)
        if event is None or event.is_set() or "Step " not in self._answers[request.token_ids.tobytes()]:
            return 0.0
        event.set()
        return 3600.0

    def choose(self, request):
        """Return the turn; the same for the same context, because agents ask again."""
        context = request.token_ids.tobytes()
        if context not in self._answers:
            text = bytes(request.token_ids[request.token_ids < 256].astype(np.uint8)).decode(errors="replace")
            self._answers[context] = self._answer(text)
        return [*self.chat.tokenizer.encode(self._answers[context]), self.chat.stop_token_ids[0]]

    def _answer(self, text):
        if self.agent.asks in text[text.rindex("user\n") :]:
            return SUMMARY
        if "# Tools" not in text:
            return "A title of the work"
        if PART in text and not any(mark in text for mark in (TASK, GO_ON, "results so far")):
            self._num_parts += 1
            return [self.agent.shell("head -1 notes.txt"), self.agent.shell("wc notes.txt"), PART_ANSWER][
                self._num_parts - 1
            ]
        if self.num_steps == NUM_STEPS:
            return ANSWER
        self.num_steps += 1
        number = self.num_steps
        return f"<think>\nI do step {number}.\n</think>\nStep {number}.\n{self._steps[number - 1]}"
