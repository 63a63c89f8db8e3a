"""
A scripted model that repairs the repository of `examples/coding_cli` by the tools of a coding agent.

It reads a file, edits it and ends. Requests without tools, such as those for a title, get a title.
"""

import asyncio
import json
import re

import numpy as np
from attrs import define, field, frozen

from turnwise import hookimpl
from turnwise_testing.engines.scripted import ScriptedEngine
from turnwise_testing.probes.agent import probe_chat

BUGGY = "    return ordered[middle]"
FIXED = "    return (ordered[middle] + ordered[~middle]) / 2"
COMMAND = r"sed -i 's|ordered\[middle\]$|(ordered[middle] + ordered[~middle]) / 2|' median.py"
ARGUMENTS = {
    "Read": lambda file: {"file_path": file},
    "Edit": lambda file: {"new_string": FIXED, "old_string": BUGGY, "file_path": file},
    "continue Read": lambda file: {"filepath": file},
    "exec_command": lambda _file: {"cmd": COMMAND},
    "fix bash": lambda _file: {"command": COMMAND},
    "fix run_shell_command": lambda _file: {"command": COMMAND, "is_background": False},
    "test run_shell_command": lambda _file: {"command": "python3 test_median.py", "is_background": False},
    "test bash": lambda _file: {"command": "python test_median.py"},
    "end bash": lambda _file: {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"},
    "opencode read": lambda file: {"filePath": file},
    "opencode edit": lambda file: {"newString": FIXED, "oldString": BUGGY, "filePath": file},
    "read": lambda _file: {"path": "median.py"},
    "edit": lambda _file: {"edits": [{"newText": FIXED, "oldText": BUGGY}], "path": "median.py"},
}
"""The arguments of each tool, with keys in another order than in its schema."""
BLOCK = """\
<think>
Step.
</think>
Let me see.

median.py
```python
<<<<<<< SEARCH
{}
=======
{}
>>>>>>> REPLACE
```
"""
EDITS = {
    "aider": (
        BLOCK.format("    no such line", FIXED),
        BLOCK.format(BUGGY, BUGGY + " + 1"),
        BLOCK.format(BUGGY + " + 1", FIXED),
    )
}
"""The turns of agents that read edits from texts: one does not match, the test fails after one, and one is right."""
CALLS = {
    "claude": ("Read", "Edit"),
    "codex": ("exec_command", "exec_command"),
    "continue": ("continue Read", "Edit"),
    "mini": ("fix bash", "test bash", "end bash"),  # it ends by a call
    "opencode": ("opencode read", "opencode edit"),
    "pi": ("read", "edit"),
    "qwen": ("fix run_shell_command", "test run_shell_command"),
}


def read_text(request):
    """Return the text of a request, whose tokens are bytes."""
    return bytes(request.token_ids[request.token_ids < 256].astype(np.uint8)).decode(errors="replace")


@define(eq=False)
class CodingModel:
    """
    Chooses turns by the number of tool results in the context, or of earlier turns for an agent without tools.

    Attributes:
        chat: of the run; its tokenizer has a token for each byte.
        cli: name of the agent.
        hold: number of the turn whose first request gets no answer before it is cancelled; None for none.
        held: set when that request is there.
    """

    chat: object
    cli: str
    hold: int | None = None
    held: asyncio.Event = field(factory=asyncio.Event)

    def engine(self):
        return ScriptedEngine(self.choose, latency_s=self.wait)

    def wait(self, request):
        """Return the seconds before a turn."""
        if self.hold is None or self.held.is_set() or self.count_results(request) != self.hold:
            return 0.0
        self.held.set()
        return 3600.0

    def choose(self, request):
        text = read_text(request)
        number = self.count_results(request)
        if self.cli in EDITS:
            answer = EDITS[self.cli][number]
        elif "# Tools" not in text:
            answer = "Repair of a median"
        elif number == len(CALLS[self.cli]):
            answer = "The mean of the two in the middle is right now."
        else:
            found = re.search(r"(/[\w./-]+/coding-\w+/repository)", text)
            file = f"{found[1] if found else '.'}/median.py"
            name = CALLS[self.cli][number]
            call = json.dumps({"name": name.split()[-1], "arguments": ARGUMENTS[name](file)})
            answer = f"<think>\nStep {number}.\n</think>\nLet me see.\n<tool_call>\n{call}\n</tool_call>"
        return [*self.chat.tokenizer.encode(answer), self.chat.stop_token_ids[0]]

    def count_results(self, request):
        if self.cli in EDITS:
            return read_text(request).count("Let me see.")
        (tag,) = self.chat.tokenizer.encode("<tool_response>")
        return int(np.count_nonzero(request.token_ids == tag))


@frozen(kw_only=True)
class CodingConfig:
    """Options of the engine `coding_model`: an agent, and an option of real engines."""

    cli: str = "pi"
    max_context: int = 0


@hookimpl
def register_engines(registry):
    """Register `coding_model`, for runs in other processes."""
    registry.add(
        "coding_model", lambda config, _resources: CodingModel(probe_chat(), config.cli).engine(), config=CodingConfig
    )
