"""An agent of Strands with an output model: URL, key and nothing more; prints the fields of a person, or the error."""

import json
import sys

from pydantic import BaseModel
from strands import Agent
from strands.models.openai import OpenAIModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def main(url, key, _mode):
    arguments = {"base_url": url, "api_key": key, "max_retries": 0}
    agent = Agent(model=OpenAIModel(client_args=arguments, model_id="tiny"), callback_handler=None)
    return agent("Who is it?", structured_output_model=Person).structured_output.model_dump()


try:
    print(json.dumps(main(*sys.argv[1:])))
except Exception as error:  # noqa: BLE001  # the test reads any error from the output
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
