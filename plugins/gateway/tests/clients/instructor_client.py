"""A program with instructor: URL, key and mode as arguments; prints the fields of a person, or the error."""

import json
import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def main(url, key, mode):
    client = instructor.from_openai(OpenAI(base_url=url, api_key=key, max_retries=0), mode=instructor.Mode[mode])
    messages = [{"role": "user", "content": "Who is it?"}]
    return client.chat.completions.create(model="tiny", response_model=Person, messages=messages, max_retries=2)


try:
    print(json.dumps(main(*sys.argv[1:]).model_dump()))
except Exception as error:  # noqa: BLE001  # the test reads any error from the output
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
