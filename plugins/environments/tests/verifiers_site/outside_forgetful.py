"""A harness of verifiers that forgets its conversation after the first turn."""

import httpx
import verifiers.v1 as vf


class Forgetful(vf.Harness[vf.HarnessConfig]):
    """Asks twice, the second time with another prompt."""

    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        """Call the model without the first turn."""
        async with httpx.AsyncClient(timeout=None) as client:
            for text in ("One.", "Two."):
                body = {"model": ctx.model, "messages": [{"role": "user", "content": text}], "stream": True}
                url, headers = f"{endpoint}/chat/completions", {"Authorization": f"Bearer {secret}"}
                await client.post(url, json=body, headers=headers)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Forgetful"]
