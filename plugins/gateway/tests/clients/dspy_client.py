"""A program with DSPy: URL, key and adapter of DSPy as arguments; prints the fields of a person, or the error."""

import json
import sys

import dspy


class WhoIsIt(dspy.Signature):
    """Name the person."""

    question: str = dspy.InputField()
    name: str = dspy.OutputField()
    age: int = dspy.OutputField()


def main(url, key, adapter):
    # DSPy asks for JSON from models alone whose names it knows to have it.
    model = dspy.LM("openai/gpt-4o-mini", api_base=url, api_key=key, cache=False, num_retries=0, max_tokens=500)
    dspy.configure(lm=model, adapter=getattr(dspy, adapter)())
    found = dspy.Predict(WhoIsIt)(question="Who is it?")
    return {"name": found.name, "age": found.age}


try:
    print(json.dumps(main(*sys.argv[1:])))
except Exception as error:  # noqa: BLE001  # the test reads any error from the output
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
