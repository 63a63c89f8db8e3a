"""
Measures the CPU cost of a call of an outside agent at some turns, relative to a turn of `tool_agent`.

    python benchmarks/gateway_cost.py [--runs 5] [--turns 4 16 64 128] [--peer .venv-rllm/bin/python]

Both variants run the same episodes with an engine that answers at once, all in the same turn: the engine waits for the
calls of all conversations, and the CPU time between two of its answers is the cost of one turn. The figures are CPU
milliseconds of the whole process with driver and gateway, without the engine, which is a part of this script. The CPU
time of the agents, which are one other process, does not count. Every trajectory is compared with the workload's
script.

`--peer` names the Python of a virtual environment with `rllm-model-gateway`. Its process forwards requests of the same
sizes to a server that answers at once, with token ids as vLLM does. It neither tokenises nor samples. Each run measures
all variants in turn, and ratios are those of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import gateway_peer
from attrs import define, field
from gateway_clients import CLIENTS, Clients, build_manager
from measurement import describe_machine, format_spread
from turn_cost import CACHE, check_result
from workload import Oracle, Workload, load_tokenizer, uniform

from turnwise import Capabilities, FinishReason, GenerateRequest, GenerateResult
from turnwise.events.logging import configure_logging
from turnwise.runtime.manager import RolloutManager

AT_ONCE = 8
WINDOW = 3
"""Turns of a figure: the named one and those before it."""


@define
class LockstepEngine:
    """
    An engine that returns the workload's turns as soon as all conversations have asked for theirs.

    Attributes:
        oracle: knows the turns.
        num_conversations: at once.
        times: CPU seconds of the process without those of the oracle, when the last conversation asks for a turn.
    """

    oracle: Oracle
    num_conversations: int
    times: list[float] = field(factory=list)
    _own_s: float = 0.0
    _num_waiting: int = 0
    _all_here: asyncio.Event = field(factory=asyncio.Event)
    capabilities = Capabilities()

    async def start(self) -> None:
        """Do nothing."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Return the workload's turn for this context, and note the CPU time when the last conversation asks."""
        started = time.thread_time()
        ids, logprobs = self.oracle.answer(request.token_ids)
        self._own_s += time.thread_time() - started
        self._num_waiting += 1
        if self._num_waiting == self.num_conversations:
            self.times.append(time.process_time() - self._own_s)
            self._num_waiting = 0
            self._all_here.set()
            self._all_here = asyncio.Event()
        else:
            await self._all_here.wait()
        return GenerateResult(token_ids=ids, logprobs=logprobs, finish_reason=FinishReason.STOP)

    async def abort(self, request_id: str) -> None:
        """Do nothing."""

    async def stop(self) -> None:
        """Do nothing."""


def measure(manager: RolloutManager, workload: Workload, engine: LockstepEngine) -> list[float]:
    """Return the CPU milliseconds of each turn from the second on; `AssertionError` for a wrong trajectory."""
    gc.collect()
    engine.times.clear()
    for result in manager.rollout(workload.tasks()):
        check_result(result, engine.oracle.script)
    times = engine.times
    return [1e3 * (end - start) / engine.num_conversations for start, end in pairwise(times)]


def mean_at(costs: list[float], turn: int) -> float:
    """Return the mean cost of a turn and some before it; the first turn is the prompt, and not in `costs`."""
    return statistics.fmean(costs[max(0, turn - 1 - WINDOW) : turn - 1])


@define
class Costs:
    """
    Costs in CPU milliseconds; all lists but `sizes` have an entry for each run.

    Attributes:
        sizes: bytes of the request of each turn.
        own: of `tool_agent`, for each turn of the table.
        outside: of `external` over HTTP, for each turn of the table.
        peers: by the store of the peer, for the first and the last turn of the table.
    """

    sizes: list[int] = field(factory=list)
    own: list[list[float]] = field(factory=list)
    outside: list[list[float]] = field(factory=list)
    peers: dict[str, list[list[float]]] = field(factory=dict)


def measure_turns(tokenizer: Any, turns: list[int], runs: int, peers: dict[str, tuple[int, int]]) -> Costs:
    """Return the costs; each run measures all variants in turn, so other load on the machine affects all of them."""
    workload = uniform(AT_ONCE, turns=max(turns), tokens=100, reply_chars=1500)
    engine = LockstepEngine(Oracle.of(workload, tokenizer), AT_ONCE)
    CLIENTS.append(clients := Clients.start(workload.reply_chars))
    costs = Costs(peers={store: [] for store in peers})
    try:
        with (
            build_manager(workload, engine, tokenizer, AT_ONCE, None) as in_process,
            build_manager(workload, engine, tokenizer, AT_ONCE, "gateway_clients:solve") as over_http,
        ):
            for index in range(runs + 1):  # the first is a warm-up
                for manager, found in ((in_process, costs.own), (over_http, costs.outside)):
                    measured = measure(manager, workload, engine)
                    found.append([mean_at(measured, turn) for turn in turns])
                costs.sizes = clients.num_bytes
                ends = [costs.sizes[turn - 1] for turn in (turns[0], turns[-1])]
                for store, (port, pid) in peers.items():
                    costs.peers[store].append(gateway_peer.measure(port, pid, ends))
                if index == 0:
                    for found in (costs.own, costs.outside, *costs.peers.values()):
                        found.clear()
    finally:
        clients.stop()
    return costs


def print_turns(turns: list[int], costs: Costs) -> None:
    """Print a line for each turn, and the growth from the first turn of the table to the last."""
    print(f"{'':22s} {'tool_agent':22s} {'external over HTTP':22s} {'added':22s} ratio")
    for index, turn in enumerate(turns):
        mine, theirs = [run[index] for run in costs.own], [run[index] for run in costs.outside]
        added = [b - a for a, b in zip(mine, theirs, strict=True)]
        ratio = [b / a for a, b in zip(mine, theirs, strict=True)]
        name = f"turn {turn}, {costs.sizes[turn - 1] / 1e3:.0f} KB"
        print(f"{name:22s} " + " ".join(f"{format_spread(each):22s}" for each in (mine, theirs, added, ratio)))
    growth = [run[-1] / run[0] for run in costs.outside]
    print(f"turn {turns[-1]} against turn {turns[0]}, over HTTP: {format_spread(growth)}", flush=True)


def print_peers(python: Path, turns: list[int], costs: Costs) -> None:
    """Print the cost of the peer for the first and the last turn, and its ratio to the gateway's in the same run."""
    print(f"{gateway_peer.read_version(python)}, and relative to external over HTTP in the same run")
    for store, runs in costs.peers.items():
        for index, turn in ((0, turns[0]), (-1, turns[-1])):
            theirs = [run[index] for run in runs]
            ratio = [a / run[index] for a, run in zip(theirs, costs.outside, strict=True)]
            name = f"{store}, {costs.sizes[turn - 1] / 1e3:.0f} KB"
            print(f"{name:22s} {format_spread(theirs):22s} {format_spread(ratio, 1)}", flush=True)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="measured runs (default: %(default)s)")
    parser.add_argument("--turns", type=int, nargs="+", default=[4, 16, 64, 128], help="(default: %(default)s)")
    parser.add_argument("--peer", type=Path, help="Python of a virtual environment with rllm-model-gateway")
    options = parser.parse_args()
    turns = sorted(options.turns)
    if turns[0] < 2:
        parser.error("--turns: the first turn is the prompt, so the smallest number is 2")
    if options.peer is not None and not options.peer.exists():
        parser.error(f"--peer: there is no {options.peer}")
    configure_logging("warning")  # as a run does: a line per call at `debug` costs nothing then
    tokenizer = load_tokenizer(CACHE)
    print(describe_machine())
    print(f"CPU milliseconds per call; median (min-max) of {options.runs} runs, {AT_ONCE} conversations")
    with ExitStack() as stack:
        stores = ("memory", "sqlite") if options.peer is not None else ()
        peers = {store: stack.enter_context(gateway_peer.start_peer(options.peer, store)) for store in stores}
        costs = measure_turns(tokenizer, turns, options.runs, peers)
    print_turns(turns, costs)
    if options.peer is not None:
        print_peers(options.peer, turns, costs)


if __name__ == "__main__":
    main()
