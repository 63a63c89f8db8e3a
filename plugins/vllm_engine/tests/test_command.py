"""
The real vLLM by the command line: a model of the hub with an option of the engine, a GGUF file,
and structured output for a client of OpenAI.
"""

import pytest

from turnwise_testing.suites.served_forms import ServedFormsSuite
from turnwise_testing.suites.served_run import ServedRunSuite

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


class TestRuns(ServedRunSuite):
    """Each test starts the engine once."""

    plugin = "vllm_engine"

    @classmethod
    def engine(cls):
        """A small engine on one thread."""
        return {"name": "vllm", "max_context": 256, "kv_cache_bytes": 64 << 20, "num_threads": 1}


class TestForms(ServedFormsSuite):
    """Each test starts the engine once."""

    plugin = "vllm_engine"

    @classmethod
    def engine(cls):
        """A small engine on one thread."""
        return {"name": "vllm", "max_context": 4096, "kv_cache_bytes": 64 << 20, "num_threads": 1, "grammars": True}
