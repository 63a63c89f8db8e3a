"""A program with instructor, whose own loop asks again after an invalid reply; see `structured_training.py`."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import instructor
from calculations import Ask, compute, work
from instructor.core import InstructorError
from openai import OpenAI
from pydantic import BaseModel, field_validator

MAX_RETRIES = 2


class calculator(BaseModel):  # noqa: N801 - the name of the tool that the model knows
    """Computes one arithmetic operation."""

    expression: str

    @field_validator("expression")
    @classmethod
    def check(cls, value: str) -> str:
        """Refuse any text but one operation."""
        compute(value)
        return value


def ask(session: dict[str, Any], question: str, counts: Counter[str]) -> Any:
    """Return a function that asks for the next call in one conversation."""
    openai = OpenAI(base_url=session["openai_base_url"], api_key=session["api_key"], max_retries=0)
    client = instructor.from_openai(openai, mode=instructor.Mode.TOOLS)
    client.on("completion:response", lambda _response: counts.update(replies=1))
    messages: list[Any] = [{"role": "user", "content": question}]

    def next_operation(_expression: str, results: list[str]) -> str:
        if results:
            call = messages[-1]["tool_calls"][0]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": results[-1]})
        before = counts["replies"]
        try:
            found, completion = client.chat.completions.create_with_completion(
                model=session["model"], response_model=calculator, messages=messages, max_retries=MAX_RETRIES
            )
        except InstructorError as error:  # also for a reply that was cut by its length
            raise ValueError(str(error)) from error
        finally:
            counts["retries"] += max(0, counts["replies"] - before - 1)
        counts["valid"] += 1
        message = completion.choices[0].message
        calls = [call.model_dump() for call in message.tool_calls]
        messages.append({"role": "assistant", "content": message.content or "", "tool_calls": calls})
        return found.expression

    return next_operation


PROGRAM: Ask = ask

if __name__ == "__main__":
    work(PROGRAM, Path(sys.argv[1]), Path(sys.argv[2]))
