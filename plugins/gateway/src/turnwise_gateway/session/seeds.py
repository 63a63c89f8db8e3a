"""The sampling parameters of turns, which do not depend on the order of calls."""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b

from attrs import define, field

from turnwise import Episode, SamplingParams
from turnwise_gateway.session.records import OpenRecord, ResumePoint
from turnwise_gateway.tree.places import ConversationNode


@define(eq=False)
class TurnSeeds:
    """
    Gives each turn of a session its seed.

    The task's own conversation has the seeds that an agent in the process has. Every other one has seeds of its name,
    its length and the number of earlier samples of the same request.
    """

    _num_samples: Counter[ConversationNode[ResumePoint]] = field(factory=Counter, init=False)

    def sampling(self, record: OpenRecord, episode: Episode, run_seed: int) -> SamplingParams:
        """Return the sampling parameters of the next turn of a record."""
        sampling, repeat = episode.sampling, self._num_samples[record.last_node]
        self._num_samples[record.last_node] += 1
        if sampling.seed is not None or not (record.name or record.parent or repeat):
            return sampling
        place = (run_seed, episode.global_step, episode.validation, episode.uid, record.name)
        text = f"gateway|{place}|{len(record.trajectory)}|{repeat}"
        return sampling.with_(seed=int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "big") >> 1)
