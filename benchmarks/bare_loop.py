"""The baseline: runs the workload in one plain asyncio loop."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import numpy as np
from workload import Oracle, Workload

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.S)


async def run(
    workload: Workload, oracle: Oracle, tokenizer: Any, tools: list[dict[str, Any]], response_length: int
) -> list[tuple[np.ndarray, ...]]:
    """Run every episode; return prompt ids, response ids, mask and log-probabilities of each."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_run_episode(workload, number, oracle, tokenizer, tools, response_length))
            for number in range(len(workload.episodes))
        ]
    return [task.result() for task in tasks]


async def _run_episode(
    workload: Workload, number: int, oracle: Oracle, tokenizer: Any, tools: list[dict[str, Any]], response_length: int
) -> tuple[np.ndarray, ...]:
    text = tokenizer.apply_chat_template(
        workload.messages(number), tools=tools, add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    num_prompt, mask, logprobs = len(ids), [], []
    while True:
        out, out_logprobs = oracle.answer(ids)
        if workload.seconds_per_token:
            await asyncio.sleep(workload.seconds_per_token * len(out))
        ids = ids + out
        mask += [1] * len(out)
        logprobs += out_logprobs
        calls = [json.loads(found) for found in CALL.findall(tokenizer.decode(out))]
        if not calls or len(mask) >= response_length:
            break
        arguments = calls[0]["arguments"]
        if arguments["ms"]:
            await asyncio.sleep(arguments["ms"] / 1e3)
        reply = workload.reply(arguments["key"])
        observation = tokenizer.encode(
            f"\n<|im_start|>user\n<tool_response>\n{reply}\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
            add_special_tokens=False,
        )
        if len(mask) + len(observation) >= response_length:
            break
        ids = ids + observation
        mask += [0] * len(observation)
        logprobs += [0.0] * len(observation)
    return (
        np.array(ids[:num_prompt], np.int32),
        np.array(ids[num_prompt:], np.int32),
        np.array(mask, np.uint8),
        np.array(logprobs, np.float32),
    )
