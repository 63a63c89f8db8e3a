"""An agent of a user: asks for replies to schemas whose grammars fail, and continues after each refusal."""

import json
import os

import openai

LARGE = {"type": "object", "properties": {f"p{number}": {"type": ["string", "integer"]} for number in range(30)}}
SCHEMAS = [{"$ref": "#"}, *[{"anyOf": [LARGE] * 30, "title": str(number)} for number in range(3)]]

client = openai.OpenAI(max_retries=0)
messages, num_failed = json.loads(os.environ["TURNWISE_TASK"])["messages"], 0
for number, schema in enumerate(SCHEMAS):
    form = {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}
    asked = [*messages, {"role": "user", "content": f"Number {number}."}]
    arguments = {"model": os.environ["TURNWISE_MODEL"], "messages": asked, "max_tokens": 300}
    try:
        client.chat.completions.create(**arguments, response_format=form)
    except openai.BadRequestError as error:
        num_failed += error.param == "response_format" and "cannot keep a turn to" in str(error)
    client.chat.completions.create(**{**arguments, "max_tokens": 5})
print(f"TURNWISE_SCORE={num_failed}")
