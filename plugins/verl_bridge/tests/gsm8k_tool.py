"""The tool of verl's documentation, and a task for it."""

from turnwise import Task

# The file of verl's documentation (docs/sglang_multiturn/multiturn.rst), unchanged but for the class.
GSM8K = """
tools:
  - class_name: "verl_like.CountingTool"
    config:
      type: native
    tool_schema:
      type: "function"
      function:
        name: "calc_gsm8k_reward"
        description: "A tool for calculating the reward of gsm8k."
        parameters:
          type: "object"
          properties:
            answer:
              type: "string"
              description: "The model's answer to the GSM8K math problem, must be a digits"
          required: ["answer"]
"""
TASK = Task(
    messages=({"role": "user", "content": "2+2?"},),
    uid="task",
    ground_truth="4",
    extra={"extra_info": {"tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"level": 3}}}}},
)
