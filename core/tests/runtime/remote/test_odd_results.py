"""An engine plugin may answer anything: only the request with the odd answer pays, as in the local runtime."""

import asyncio
import pickle
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from attrs import evolve, field, frozen

from turnwise.episode.engine_results import check_result
from turnwise.errors import EngineError, text_of
from turnwise.record.column_specs import ColumnSpec
from turnwise.runtime.remote.replica_pool import ReplicaPool
from turnwise.runtime.remote.replica_server import ReplicaServer
from turnwise.runtime.remote.wire import name_error, read_error
from turnwise.types import GenerateRequest, GenerateResult, SamplingParams
from turnwise_routers import LeastTokens
from turnwise_testing.engines.scripted import ScriptedEngine

IDS = (3, 1, 4)
SPECS = {
    "rank": ColumnSpec(name="rank", dtype="int32"),
    "pair": ColumnSpec(name="pair", dtype="float32", shape=(2,), tokens="all"),
}


class Rude:
    """Cannot be pickled, shown or copied."""

    def __repr__(self):
        raise RuntimeError("no text")

    def __reduce__(self):
        raise RuntimeError("no copy")


class RudeText(str):
    """A text that another process cannot read."""

    def __reduce_ex__(self, _protocol):
        raise RuntimeError("no copy")


class RudeError(Exception):
    """Has no text."""

    def __str__(self):
        raise RuntimeError("no text")


class RudeMapping(Mapping):
    """Fails when it is read."""

    def __getitem__(self, name):
        raise RuntimeError("no values")

    def __iter__(self):
        return iter(["rank"])

    def __len__(self):
        return 1


@frozen(kw_only=True, eq=False)
class LooseResult(GenerateResult):
    """A subclass that converts nothing."""

    token_ids: object = field()
    logprobs: object = field()


def deep(levels):
    """Return a list of lists of lists."""
    values = 1
    for _ in range(levels):
        values = [values]
    return values


def loose(**changes):
    """Return a function that makes a result of the subclass."""
    return lambda good: LooseResult(
        **{"token_ids": good.token_ids, "logprobs": good.logprobs, "finish_reason": good.finish_reason, **changes}
    )


def changed(**changes):
    """Return a function that changes a good result."""
    return lambda good: evolve(good, **changes)


def with_column(values, name="rank"):
    """Return a function that gives a good result a column."""
    return changed(columns={name: values})


def raising(error):
    """Return a function that raises."""

    def answer(_good):
        raise error

    return answer


def telling(ids):
    """Return a function that lets the listener of a request hear ids before its result."""

    def answer(good, request):
        request.on_tokens(ids)
        return good

    return answer


GOOD = {  # the last two are of plain values, and the record refuses them
    "a column as a list": with_column([0, 1, 2]),
    "a column as a tuple": with_column((0, 1, 2)),
    "a column as a tensor": with_column(torch.arange(3)),
    "a column as a range": with_column(range(3)),
    "a column as bytes": with_column(memoryview(bytes([1, 2, 3]))),
    "a column of another byte order": with_column(np.arange(3, dtype=">i4")),
    "a column that is a mask": with_column(np.ma.masked_array([1, 2, 3], [0, 1, 0])),
    "no columns": changed(columns={}),
    "versions as a list": changed(weight_version=[1, 1, 2]),
    "versions as a tensor": changed(weight_version=torch.ones(3, dtype=torch.int64)),
    "a version of numpy": changed(weight_version=np.int64(4)),
    "a version as an array": changed(weight_version=np.array(4)),
    "a stop id of numpy": changed(stop_reason=np.int64(4)),
    "a stop text of a class": changed(stop_reason=RudeText("end")),
    "cached tokens of numpy": changed(num_cached_tokens=np.int32(2)),
    "a subclass": loose(),
    "a subclass of lists": loose(token_ids=list(IDS), logprobs=[-0.5] * 3),
    "listeners that hear an array": telling(np.array([3, 1], np.int64)),
    "listeners that hear a tensor": telling(torch.tensor([3, 1])),
    "log-probabilities without an end": changed(logprobs=[-np.inf] * 3),
    "ids below 0": changed(token_ids=np.array([3, -1, 4], np.int32)),
}
BAD = {
    "None": lambda _good: None,
    "a text": lambda _good: "text",
    "a dict": lambda _good: {},
    "a class": lambda _good: GenerateResult,
    "a rude object": lambda _good: Rude(),
    "a subclass of texts": loose(token_ids="abc"),
    "a subclass without numbers": loose(logprobs=None),
    "a subclass of rude objects": loose(token_ids=Rude()),
    "too few log-probabilities": lambda good: evolve(good, logprobs=[-0.5]),
    "a subclass of too few log-probabilities": loose(logprobs=np.zeros(1, np.float32)),
    "log-probabilities of texts": lambda good: evolve(good, logprobs=["a"] * 3),
    "log-probabilities above 0": changed(logprobs=[0.5] * 3),
    "tokens of texts": lambda good: evolve(good, token_ids=["a", "b", "c"]),
    "tokens of no vocabulary": changed(token_ids=[3, 1, 2**30]),
    "tokens above the limit": changed(token_ids=[3] * 21, logprobs=[-0.5] * 21),
    "the reason eos": changed(finish_reason="eos"),
    "the reason stop as a text": changed(finish_reason="stop"),
    "the reason None": changed(finish_reason=None),
    "a number as reason": changed(finish_reason=1),
    "a rude reason": changed(finish_reason=Rude()),
    "a version None": changed(weight_version=None),
    "a version as a text": changed(weight_version="7"),
    "a version as a fraction": changed(weight_version=1.5),
    "a version below 0": changed(weight_version=-1),
    "a version above the limit": changed(weight_version=2**31),
    "versions above the limit": changed(weight_version=np.array([2**31] * 3)),
    "a version of any size": changed(weight_version=2**70),
    "too few versions": changed(weight_version=[1]),
    "versions without a length": changed(weight_version=[[1], [2, 3]]),
    "a rude version": changed(weight_version=Rude()),
    "cached tokens None": changed(num_cached_tokens=None),
    "cached tokens as a text": changed(num_cached_tokens="3"),
    "rude cached tokens": changed(num_cached_tokens=Rude()),
    "a list as stop reason": changed(stop_reason=[1]),
    "a rude stop reason": changed(stop_reason=Rude()),
    "columns as a list": changed(columns=[1]),
    "columns as a text": changed(columns="rank"),
    "columns that fail": changed(columns=RudeMapping()),
    "columns that are rude": changed(columns=Rude()),
    "a column with a number as name": changed(columns={1: np.zeros(3, np.int32)}),
    "a column with a rude name": changed(columns={Rude(): np.zeros(3, np.int32)}),
    "an undeclared column": with_column(np.zeros(3, np.int32), "other"),
    "a column None": with_column(None),
    "a column as a number": with_column(3),
    "a column as a dict": with_column({"a": 1}),
    "a column as a generator": lambda good: evolve(good, columns={"rank": (i for i in range(3))}),
    "a column of None": with_column([None] * 3),
    "a column of texts": with_column(["a"] * 3),
    "a column of rude objects": with_column([Rude()] * 3),
    "a column of an array of rude objects": with_column(np.array([Rude()] * 3, object)),
    "a column with fields": with_column(np.zeros(3, [("a", "i4")])),
    "a column with fields of objects": with_column(np.array([(Rude(),)] * 3, [("a", object)])),
    "a column of complex numbers": with_column([1j] * 3),
    "a column of another length": with_column([0, 1]),
    "a column of lists of other lengths": with_column([[1], [1, 2], [1]]),
    "a column of other numbers": with_column([0.5] * 3),
    "a column of another shape": with_column(np.zeros((3, 5)), "pair"),
    "a deep column": with_column(deep(50)),
    "a very deep column": with_column(deep(5000)),
    "a column of a tensor with a gradient": with_column(torch.zeros(3, requires_grad=True)),
    "a column of a type of torch": with_column(torch.zeros(3, dtype=torch.bfloat16)),
    "an error": raising(ValueError("no")),
    "an error without a text": raising(RudeError()),
    "an exit": raising(SystemExit(3)),
    "listeners that hear texts": telling(["a"]),
    "listeners that hear huge ids": telling([2**40]),
    "listeners that hear rude objects": telling([Rude()]),
    "listeners that hear None": telling(None),
    "listeners that hear a number": telling(3),
    "listeners that hear lists": telling([[1, 2], [3]]),
}


class OddEngine(ScriptedEngine):
    """Answers the request `odd` oddly, and others well; all of them end together."""

    def __init__(self, answer):
        super().__init__()
        self.capabilities = evolve(self.capabilities, vocab_size=1000)
        self.answer = answer

    async def generate(self, request):
        good = await super().generate(evolve(request, on_tokens=None))
        good = evolve(good, token_ids=IDS, logprobs=[-0.5] * 3, columns={"rank": np.arange(3, dtype=np.int32)})
        if request.request_id != "odd":
            return good
        takes_request = self.answer.__code__.co_argcount == 2
        return self.answer(good, request) if takes_request else self.answer(good)


def request(name, heard=None):
    return GenerateRequest(
        request_id=name,
        trajectory_id=f"t-{name}",
        token_ids=[1, 2],
        sampling=SamplingParams(max_tokens=20),
        on_tokens=heard.extend if heard is not None else None,
    )


async def ask(client, one, capabilities):
    """Return the checked result of a request, as the episode reads it, or the error that fails the episode."""
    try:
        return check_result(await client.generate(one), one, capabilities, SPECS)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the error is the outcome
        return error


async def ask_replica(answer):
    """Return the outcomes of five requests to one replica, whose messages are pickled."""
    async with asyncio.TaskGroup() as group:
        engine, loop = OddEngine(answer), asyncio.get_running_loop()
        await engine.start()
        server = ReplicaServer(engine)
        pool = ReplicaPool(LeastTokens(), engine.capabilities, 1, restart_timeout_s=60.0)
        server.connect(0, lambda message: pool.receive(0, pickle.loads(pickle.dumps(message))))
        pool.replica_up(0, lambda message: loop.call_soon(server.receive, 0, message, group))
        heard = []
        names = ("a", "b", "odd", "c")
        asked = [group.create_task(ask(pool, request(name, heard), engine.capabilities)) for name in names]
        async with asyncio.timeout(20):
            found = [await task for task in asked]
            found.append(await ask(pool, request("later"), engine.capabilities))
    return found[2], [*found[:2], *found[3:]]


async def ask_engine(answer):
    """Return the outcome of the odd request in the local runtime."""
    engine = OddEngine(answer)
    await engine.start()
    return await ask(engine, request("odd", []), engine.capabilities)


def plain(result):
    """Return all values of a result, to compare."""
    columns = {name: (values.dtype, values.tolist()) for name, values in (result.columns or {}).items()}
    version = np.asarray(result.weight_version).tolist()
    ids, logprobs = result.token_ids.tolist(), result.logprobs.tolist()
    return ids, logprobs, result.finish_reason, version, result.stop_reason, result.num_cached_tokens, columns


@pytest.mark.parametrize("name", [*GOOD, *BAD])
def test_only_the_odd_request_pays(name):
    """Others are answered; the odd one has the result or the error of the local runtime, however odd the answer is."""
    odd, others = asyncio.run(ask_replica((GOOD | BAD)[name]))
    local = asyncio.run(ask_engine((GOOD | BAD)[name]))

    assert [list(IDS)] * 4 == [each.token_ids.tolist() for each in others]
    if name in GOOD:
        assert plain(local) == plain(odd)
    elif name.startswith("listeners"):
        assert isinstance(odd, EngineError)  # the local runtime hands these ids to the listener as they are
    else:
        assert isinstance(odd, EngineError)
        expected = local if isinstance(local, EngineError) else read_error(name_error(local), text_of(local))
        assert (type(expected), str(expected)) == (type(odd), str(odd))
        assert str(odd)
