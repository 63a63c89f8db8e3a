"""An agent of Agno with an output schema: URL, key and nothing more; prints the fields of a person, or the error."""

import json
import sys

from agno.agent import Agent
from agno.models.openai import OpenAIChat
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def main(url, key, _mode):
    model = OpenAIChat(id="tiny", base_url=url, api_key=key, max_retries=0)
    found = Agent(model=model, output_schema=Person, telemetry=False).run("Who is it?").content
    if not isinstance(found, Person):
        raise TypeError(f"the answer is {found!r}")
    return found.model_dump()


try:
    print(json.dumps(main(*sys.argv[1:])))
except Exception as error:  # noqa: BLE001  # the test reads any error from the output
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
