"""
A program with DSPy, which asks again by its adapter for JSON after a reply that does not fit.

    python dspy_program.py CONTROL_FILE LOG                works
    python dspy_program.py --demonstrations TASKS NUM OUT  writes conversations for `turnwise convert --to sft`
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import dspy
from calculations import Ask, read_expression, solve_steps, work
from dspy.utils.exceptions import AdapterParseError


class NextOperation(dspy.Signature):
    """Name the next operation."""

    question: str = dspy.InputField()
    operation: str = dspy.OutputField()


def ask(session: dict[str, Any], _question: str, counts: Counter[str]) -> Any:
    """Return a function that asks for the next operation, each time in a new conversation."""
    # DSPy asks for JSON from models alone whose names it knows to have it.
    place = {"api_base": session["openai_base_url"], "api_key": session["api_key"]}
    model = dspy.LM("openai/gpt-4o-mini", **place, cache=False, num_retries=0, max_tokens=96)
    predict = dspy.Predict(NextOperation)

    def next_operation(expression: str, _results: list[str]) -> str:
        before = len(model.history)
        try:
            with dspy.context(lm=model, adapter=dspy.ChatAdapter()):
                found = predict(question=f"What is {expression}?")
        except (AdapterParseError, RuntimeError) as error:  # it wraps the error of its second adapter
            raise ValueError(str(error)) from error
        finally:
            asked = len(model.history) - before
            counts["replies"] += asked
            counts["retries"] += max(0, asked - 1)
        counts["valid"] += 1
        return found.operation

    return next_operation


def write_demonstrations(tasks: Path, num_tasks: int, out: Path) -> None:
    """Write a conversation for each step of some tasks, as both adapters put it."""
    with out.open("w", encoding="utf-8") as file:
        for line in tasks.read_text(encoding="utf-8").splitlines()[:num_tasks]:
            question = json.loads(line)["prompt"][-1]["content"]
            for expression, operation in solve_steps(read_expression(question)):
                for adapter in (dspy.ChatAdapter(), dspy.JSONAdapter()):
                    messages = adapter.format(NextOperation, [], {"question": f"What is {expression}?"})
                    answer = adapter.format_assistant_message_content(NextOperation, {"operation": operation})
                    messages.append({"role": "assistant", "content": answer})
                    file.write(json.dumps({"messages": messages}) + "\n")


PROGRAM: Ask = ask

if __name__ == "__main__":
    if sys.argv[1] == "--demonstrations":
        write_demonstrations(Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    else:
        work(PROGRAM, Path(sys.argv[1]), Path(sys.argv[2]))
