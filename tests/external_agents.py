"""Outside agents as functions: they know the model's API and nothing of the run."""

import asyncio
import random

import aiohttp


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
            await asyncio.sleep(waits.choice([0.0, 0.0, 0.02, 0.1]))
    return 1.0
