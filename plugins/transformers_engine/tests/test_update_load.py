"""100 weight updates while requests run: every token agrees with its version."""

import pytest

from turnwise_testing.checks.engine.load import updates_under_load
from turnwise_testing.probes.engine import EngineProbe

NUM_UPDATES = 100


@pytest.mark.slow
def test_a_hundred_updates_under_load(tiny_model, tiny_reference, serve):
    """Every token is the greedy one under the weight version that it claims."""
    probe = EngineProbe(vocab_size=512, num_long_tokens=100, reference=tiny_reference, logprob_bound=1e-4)

    async def scenario(engine):
        return await updates_under_load(engine, probe, num_updates=NUM_UPDATES), engine.stats()["num_running"]

    figures, num_running = serve(tiny_model, scenario)

    print(figures)
    figures.expect_right()
    assert 0 == num_running
    assert figures.num_right_before < 0.5 * figures.num_tokens_before
    assert figures.num_mixed > figures.num_answers / 2
    assert figures.num_versions > 0.9 * NUM_UPDATES
