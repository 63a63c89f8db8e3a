"""
A rollout with servers that others wrote: time and git from PyPI, and a file system from npm.

`make mcp-servers` installs them. The model is scripted, everything else is real.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise_result_files import read_results
from turnwise_testing.inputs.tokenizers import byte_tokenizer
from turnwise_testing.whole_runs.installation import install_plugin

SERVERS = Path(os.environ.get("TURNWISE_MCP_SERVERS", Path(__file__).parents[3] / ".venv-mcp-servers"))
FILESYSTEM = SERVERS / "node_modules/@modelcontextprotocol/server-filesystem/dist/index.js"
PLUGIN = '''
from transformers import AutoTokenizer
from turnwise import hookimpl
from turnwise_testing.engines.scripted import ScriptedEngine

TURN = """<tool_call>{"name": "convert_time", "arguments": {"source_timezone": "UTC", "time": "12:00",
"target_timezone": "Asia/Tokyo"}}</tool_call><tool_call>{"name": "git_status", "arguments": {"repo_path": "."}}
</tool_call><tool_call>{"name": "read_text_file", "arguments": {"path": "note.txt"}}</tool_call>"""


class Engine(ScriptedEngine):
    def __init__(self, config, resources):
        tokenizer = AutoTokenizer.from_pretrained(resources.model.path)
        turns = (TURN + "<|im_end|>", "Done.<|im_end|>")
        first, last = (tokenizer.encode(turn, add_special_tokens=False) for turn in turns)
        super().__init__(lambda request: last if TURN in tokenizer.decode(request.token_ids) else first, record=False)


@hookimpl
def register_engines(registry):
    registry.add("scripted_calls", Engine)
'''


@pytest.mark.slow
@pytest.mark.skipif(not FILESYSTEM.is_file(), reason="the servers are not installed: make mcp-servers")
def test_a_rollout_with_three_real_servers(tmp_path: Path) -> None:
    """Each episode gets three processes, and the model reads their answers."""
    install_plugin(tmp_path, "scripted_calls", PLUGIN)
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "What time is it?"}]}))
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    (tmp_path / "note.txt").write_text("a note in a file")
    servers = {
        "time": {"command": str(SERVERS / "bin/python"), "args": ["-m", "mcp_server_time"]},
        "git": {"command": str(SERVERS / "bin/python"), "args": ["-m", "mcp_server_git"]},
        "files": {"command": "node", "args": [str(FILESYSTEM), str(tmp_path)]},
    }
    (tmp_path / "mcp.json").write_text(
        json.dumps({"mcpServers": {name: {"cwd": str(tmp_path)} | each for name, each in servers.items()}})
    )
    config = {
        "model": {"path": "model"},
        "data": {"path": "data.jsonl"},
        "engine": "scripted_calls",
        "agent": {"name": "tool_agent", "max_parallel_calls": 3, "max_tool_response_length": 2000},
        "parser": "hermes",
        "tools": [{"name": "mcp", "file": "mcp.json", "include": ["time.*", "git.git_status", "files.read_text_file"]}],
        "rollout": {"n": 2, "prompt_length": 16384, "response_length": 8192},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "turnwise.cli", "rollout", "run.yaml", "--out", "out"]

    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    results = read_results(tmp_path / "out")
    assert len(results) == 2
    for result in results:
        answers = [message["content"] for message in result.messages if message["role"] == "tool"]
        assert "+9.0h" in answers[0]
        assert "note.txt" in answers[1]
        assert "a note in a file" in answers[2]
