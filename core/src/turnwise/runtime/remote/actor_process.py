"""Settings of a process that runs one actor and nothing else."""

from __future__ import annotations

import gc

from turnwise.episode.containment import contain_exits


def prepare_process() -> None:
    """
    Keep tasks from ending the event loop, and garbage collections from visiting the objects of the start.

    An actor calls it on its event loop when it has built its parts.
    """
    contain_exits()
    # With torch and transformers some 350,000 objects live as long as the process. A full collection visits them all:
    # it takes 150 to 220 ms, and meanwhile no episode of the process continues. Frozen objects are not visited.
    # Only actors do this. The process of the driver is the user's, and so are the settings of its collector.
    gc.collect()
    gc.freeze()
