"""An agent of a user: asks for replies to random JSON schemas, and checks those that no limit has cut."""

import json
import os
import sys
from collections import Counter

import jsonschema
from openai import OpenAI

from turnwise_testing.inputs.schemas import random_schema

client, counts = OpenAI(max_retries=0), Counter()
messages = json.loads(os.environ["TURNWISE_TASK"])["messages"]
for seed in range(int(sys.argv[1])):
    schema = random_schema(seed)
    form = {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}
    # Another conversation each time: the session keeps equal requests apart only by their number.
    asked = [*messages, {"role": "user", "content": f"Number {seed}."}]
    (choice,) = client.chat.completions.create(
        model=os.environ["TURNWISE_MODEL"], messages=asked, response_format=form, max_tokens=700
    ).choices
    counts[choice.finish_reason] += 1
    if choice.finish_reason == "stop":
        jsonschema.validate(json.loads(choice.message.content), schema)
print(f"TURNWISE_SCORE={counts['stop']}")
