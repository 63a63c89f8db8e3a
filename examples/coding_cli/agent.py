"""
Lets an unmodified coding agent repair a small repository: `python agent.py NAME`, as listed in README.md.

The agent is not changed. It gets a fresh home with the configuration that leads it to the model of the run, and a fresh
copy of the repository. The score is 1 if the test of the task passes, and 0 if not.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

Command = tuple[list[str], dict[str, str]]
"""A command, to which the prompt is added, and its environment."""

REPOSITORY = Path(__file__).with_name("repository")
MODEL, KEY = os.environ["TURNWISE_MODEL"], os.environ["OPENAI_API_KEY"]
OPENAI_URL, ANTHROPIC_URL = os.environ["OPENAI_BASE_URL"], os.environ["ANTHROPIC_BASE_URL"]
TOKENS = int(os.environ.get("CODING_CONTEXT", "32768"))
"""Length of the context that the agents are told; they summarise when it is nearly full."""


def configure_aider(home: Path) -> Command:
    """Return the command and the environment of aider, which edits by text and runs the test itself."""
    limits = {"max_input_tokens": TOKENS, "max_tokens": TOKENS, "max_output_tokens": 4096}
    known = home / "models.json"
    # A local price list spares the requests for one; without it `litellm` would ask a server.
    write(known, json.dumps({f"openai/{MODEL}": {**limits, "litellm_provider": "openai", "mode": "chat"}}))
    command = ["aider", "--model", f"openai/{MODEL}", "--model-metadata-file", str(known), "--edit-format", "diff"]
    command += ["--no-git", "--yes-always", "--no-check-update", "--no-show-release-notes", "--analytics-disable"]
    command += ["--no-show-model-warnings", "--auto-test", "--test-cmd", "python test_median.py", "median.py"]
    environment = {"OPENAI_API_BASE": OPENAI_URL, "OPENAI_API_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return [*command, "--message"], environment


def configure_claude(_home: Path) -> Command:
    """Return the command and the environment of Claude Code."""
    environment = {
        "ANTHROPIC_BASE_URL": ANTHROPIC_URL,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    return ["claude", "--permission-mode", "acceptEdits", "--print"], environment


def configure_codex(home: Path) -> Command:
    """Return the command and the environment of Codex; the run's box has to be around it, so its own is off."""
    lines = [
        f'model = "{MODEL}"',
        f"model_context_window = {TOKENS}",
        'model_provider = "run"',
        "[model_providers.run]",
        'name = "run"',
        f'base_url = "{OPENAI_URL}"',
        'env_key = "OPENAI_API_KEY"',
        'wire_api = "responses"',
    ]
    write(home / ".codex/config.toml", "\n".join(lines))
    command = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return command, {"OPENAI_API_KEY": KEY}


def configure_continue(home: Path) -> Command:
    """Return the command and the environment of Continue's `cn`."""
    model = {
        "name": MODEL,
        "provider": "openai",
        "model": MODEL,
        "apiBase": OPENAI_URL,
        "apiKey": KEY,
        "roles": ["chat"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {"contextLength": TOKENS, "maxTokens": 4096},
    }
    config = home / "continue.yaml"  # JSON is YAML, too
    write(config, json.dumps({"name": "run", "version": "0.0.1", "schema": "v1", "models": [model]}))
    return ["cn", "--config", str(config), "--auto", "--print"], {}


def configure_mini(home: Path) -> Command:
    """Return the command and the environment of mini-SWE-agent, whose only tool is a shell."""
    environment = {
        "OPENAI_API_BASE": OPENAI_URL,
        "OPENAI_API_KEY": KEY,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",  # it knows no price of this model
        "MSWEA_GLOBAL_CONFIG_DIR": str(home),
    }
    return ["mini", "--model", f"openai/{MODEL}", "--yolo", "--exit-immediately", "--task"], environment


def configure_opencode(_home: Path) -> Command:
    """Return the command and the environment of opencode."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": OPENAI_URL, "apiKey": KEY},
        "models": {MODEL: {"name": MODEL, "limit": {"context": TOKENS, "output": 4096}}},
    }
    config = {"provider": {"run": provider}, "model": f"run/{MODEL}", "small_model": f"run/{MODEL}"}
    quiet = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    return ["opencode", "run"], {"OPENCODE_CONFIG_CONTENT": json.dumps({**config, "share": "disabled"}), **quiet}


def configure_pi(home: Path) -> Command:
    """Return the command and the environment of pi."""
    provider = {
        "baseUrl": OPENAI_URL,
        "apiKey": "OPENAI_API_KEY",  # the name of the variable
        "api": "openai-completions",
        "models": [{"id": MODEL, "name": MODEL, "contextWindow": TOKENS, "maxTokens": 4096}],
    }
    write(home / ".pi/agent/models.json", json.dumps({"providers": {"run": provider}}))
    return ["pi", "--offline", "--provider", "run", "--model", MODEL, "--print"], {"OPENAI_API_KEY": KEY}


def configure_qwen(home: Path) -> Command:
    """Return the command and the environment of Qwen Code."""
    model = {"name": MODEL, "generationConfig": {"contextWindowSize": TOKENS}}
    write(home / ".qwen/settings.json", json.dumps({"model": model, "general": {"enableAutoUpdate": False}}))
    environment = {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": OPENAI_URL, "OPENAI_MODEL": MODEL}
    return ["qwen", "--yolo", "--auth-type", "openai", "--prompt"], environment


def write(path: Path, text: str) -> None:
    """Write a file and its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def passes_test(repository: Path) -> bool:
    """Return whether the test of the task passes in a repository, whatever the agent has made of its copy."""
    shutil.copy(REPOSITORY / "test_median.py", repository)
    return subprocess.run([sys.executable, "test_median.py"], cwd=repository, check=False, timeout=60).returncode == 0


def main() -> None:
    """Run the agent on a copy of the repository, and report the score."""
    configure = {
        "aider": configure_aider,
        "claude": configure_claude,
        "codex": configure_codex,
        "continue": configure_continue,
        "mini": configure_mini,
        "opencode": configure_opencode,
        "pi": configure_pi,
        "qwen": configure_qwen,
    }[sys.argv[1]]
    prompt = json.loads(os.environ["TURNWISE_TASK"])["messages"][-1]["content"]
    with tempfile.TemporaryDirectory(prefix="coding-") as folder:
        home, repository = Path(folder, "home"), Path(folder, "repository")
        home.mkdir()
        shutil.copytree(REPOSITORY, repository)
        command, variables = configure(home)
        # Nothing of the user's own environment but the path: it may have keys and settings of the same agent.
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", **variables}
        subprocess.run([*command, prompt], cwd=repository, env=environment, stdin=subprocess.DEVNULL, check=True)
        print(f"TURNWISE_SCORE={float(passes_test(repository))}")


main()
