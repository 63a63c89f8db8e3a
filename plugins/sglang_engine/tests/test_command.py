"""
The real SGLang by the command line: a model of the hub with an option of the engine, a GGUF file,
and structured output for a client of OpenAI.
"""

import pytest

from turnwise_testing.suites.served_forms import ServedFormsSuite
from turnwise_testing.suites.served_run import ServedRunSuite

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


class TestRuns(ServedRunSuite):
    """Each test starts the engine once."""

    plugin = "sglang_engine"

    @classmethod
    def engine(cls):
        """A small engine on one thread."""
        return {
            "name": "sglang",
            "max_context": 256,
            "device": "cpu",
            "num_threads": 1,
            "engine_args": {"disable_overlap_schedule": True},
        }


class TestForms(ServedFormsSuite):
    """Each test starts the engine once."""

    plugin = "sglang_engine"

    @classmethod
    def engine(cls):
        """A small engine on one thread."""
        return {"name": "sglang", "max_context": 4096, "device": "cpu", "num_threads": 1, "grammars": True}
