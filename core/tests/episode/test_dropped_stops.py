"""Turns without the id that ended them: `generate(drop_stops=True)`."""

import numpy as np
from attrs import evolve
from episode_fakes import EOS, TinyEngine, run
from hypothesis import given
from hypothesis import strategies as st

from turnwise import Status


class StoppingEngine(TinyEngine):
    """Names the id that ended a turn, as engines do."""

    def answer(self, ids, reason):
        return evolve(super().answer(ids, reason), stop_reason=ids[-1] if ids[-1] == EOS else None)


class Turns:
    """Samples turns in one step; each ends in the record with its stop id, or without it."""

    def __init__(self, drops):
        self.drops = drops

    async def step(self, episode):
        episode.begin(np.array([1]))
        for drops in self.drops:
            await episode.generate(drop_stops=drops)
            episode.observe(np.array([9]))
        return "terminated"


@given(drops=st.lists(st.booleans(), min_size=1, max_size=6), only_stop=st.booleans())
def test_dropped_stops_leave_the_other_tokens(drops, only_stop):
    """Whichever turns drop their stop id, the record has all other tokens and passes the check against the engine's."""
    turn = [EOS] if only_stop else [7, 8, EOS]

    result = run(Turns(drops), StoppingEngine(turn))

    expected = [id_ for drop in drops for id_ in (*(turn[:-1] if drop else turn), 9)]
    assert (Status.COMPLETED, expected) == (result.status, result.trajectories[0].response_ids.tolist()), result.fault
