"""Outside agents as functions: they know the model's API and nothing of the run."""

import asyncio
import random
import threading

import aiohttp

LONGEST_S = [0.1]
"""Longest wait of `ask_thrice` between two calls; tests change it."""
CALLED, MAY_GO_ON = threading.Event(), threading.Event()
"""The task `held` sets the first one after its first call, and then waits for the second."""


async def ask_thrice(task, client):
    """Call the model three times, with waits of random lengths between the calls; return 1."""
    waits = random.Random(task.uid)
    messages = [dict(message) for message in task.messages]
    headers = {"Authorization": f"Bearer {client.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        for _ in range(3):
            body = {"model": client.model, "messages": messages}
            async with http.post(f"{client.openai_base_url}/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                answer = await response.json()
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "Go on."}]
            if task.uid == "held" and not CALLED.is_set():
                CALLED.set()
                await asyncio.to_thread(MAY_GO_ON.wait)
            await asyncio.sleep(waits.choice([0.0, 0.0, 0.2, 1.0]) * LONGEST_S[-1])
    return 1.0
