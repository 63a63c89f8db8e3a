"""A Ray actor with an SGLang engine, as a replica of turnwise is one. Ray's workers import this module."""

from turnwise.errors import EngineError
from turnwise.protocols import Resources
from turnwise_sglang_engine import SglangConfig, SglangEngine
from turnwise_testing.engines.scenarios import simple_request


class Replica:
    """Holds an engine; its methods return plain values, or the text of an error."""

    def __init__(self, options):
        self.engine = SglangEngine(SglangConfig(**options), Resources())

    async def start(self):
        try:
            await self.engine.start()
        except EngineError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    async def generate(self, max_tokens):
        try:
            result = await self.engine.generate(simple_request(temperature=0.0, max_tokens=max_tokens))
        except EngineError as error:
            return f"{type(error).__name__}: {error}"
        return len(result.token_ids), result.weight_version

    async def update(self, weights, version):
        await self.engine.update_weights(weights.items(), version)

    async def own_server(self):
        return self.engine._server._process.pid

    async def stop(self):
        await self.engine.stop()
