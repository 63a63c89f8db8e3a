"""Weights arrive with the same names, shapes, dtypes and bits, for any weights and any transport."""

import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.errors import EngineError
from turnwise.protocols.weights import TensorSpec
from turnwise.weights.sources import source_of
from turnwise_testing.checks.transport import ReceivingEngine, assert_same, carry, some_weights, within
from turnwise_weight_transports.broadcast import BroadcastTransport, _unpack_on_device
from turnwise_weight_transports.buckets import (
    allocate_zeros,
    compute_checksum,
    fill_buckets,
    plan_buckets,
    unpack_bucket,
    verify_checksum,
)
from turnwise_weight_transports.config import BroadcastConfig, BucketConfig, DiskConfig
from turnwise_weight_transports.disk import DiskTransport
from turnwise_weight_transports.shm import SharedMemoryTransport

DTYPES = (
    *(np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *map(np.dtype, (np.bool_, np.float16, np.float32, np.float64)),
    *map(np.dtype, (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)),
)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
ORDERS = ("plain", "transposed", "strided")


@st.composite
def arrays(draw):
    """An array of any dtype, shape, bits and memory order; it may be empty or 0-d."""
    dtype, shape, order = draw(st.sampled_from(DTYPES)), draw(SHAPES), draw(st.sampled_from(ORDERS))
    size = int(np.prod(shape))
    content = draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
    values = np.frombuffer(content, np.uint8)
    if dtype == np.bool_:
        values = values & 1  # other bytes are no booleans
    array = values.view(dtype).reshape(shape)
    if order == "transposed":
        return np.ascontiguousarray(array.T).T.reshape(shape)
    return np.repeat(array, 2, axis=0)[::2] if order == "strided" and shape else array


weights_of_any_kind = st.lists(arrays(), max_size=8).map(lambda found: {f"w{i}": each for i, each in enumerate(found)})
bucket_sizes = st.sampled_from([1, 100, 64 * 2**20])
sizes_alone = st.sampled_from([None, 1, 40, 2**20])


@given(weights_of_any_kind, bucket_sizes, sizes_alone)
def test_a_plan_covers_every_weight_once(weights, bucket_bytes, alone_bytes):
    """Weights keep their order, start at multiples of 64 bytes, never overlap, and exceed the size only alone."""
    specs = source_of(weights).specs
    buckets = plan_buckets(specs, bucket_bytes, alone_bytes)

    assert [spec for bucket in buckets for spec, _start in bucket.entries] == list(specs)
    for bucket in buckets:
        end = 0
        for spec, start in bucket.entries:
            assert start >= end
            assert start % 64 == 0
            end = start + spec.num_bytes
        assert end == bucket.num_bytes
        assert bucket.num_bytes <= bucket_bytes or len(bucket.entries) == 1
        sizes = [spec.num_bytes for spec, _start in bucket.entries]
        assert alone_bytes is None or len(sizes) == 1 or max(sizes) < alone_bytes


@given(weights_of_any_kind, bucket_sizes, sizes_alone)
def test_packing_and_unpacking_keep_every_bit(weights, bucket_bytes, alone_bytes):
    """Packing works for any dtype, shape and memory order."""
    source = source_of(weights)
    buckets = plan_buckets(source.specs, bucket_bytes, alone_bytes)
    filled = fill_buckets(buckets, source, allocate_zeros, lend_alone=alone_bytes is not None)
    unpacked = {name: array for bucket, buffer in filled for name, array in unpack_bucket(bucket, buffer)}

    assert_same({name: np.array(array, order="C") for name, array in weights.items()}, unpacked)


@settings(max_examples=25, deadline=None)
@given(weights_of_any_kind, bucket_sizes, st.sampled_from(["none", "crc32", "xxh3"]))
def test_shared_memory_carries_weights_of_any_kind(weights, bucket_bytes, checksum):
    """The weights may be none at all, empty, or 0-d."""
    transport = SharedMemoryTransport(BucketConfig(bucket_bytes=bucket_bytes, checksum=checksum))
    assert_carried(transport, weights)


@settings(max_examples=25, deadline=None)
@given(weights_of_any_kind, bucket_sizes, st.sampled_from(["none", "crc32", "xxh3"]))
def test_shared_memory_says_where_each_weight_is(weights, bucket_bytes, checksum):
    """An engine finds the bytes of every weight at the place in the file, and may map it instead of a copy."""
    transport = SharedMemoryTransport(BucketConfig(bucket_bytes=bucket_bytes, checksum=checksum))
    found = {}

    def read(place):
        content = Path(place.path).read_bytes()
        return content[place.offset : place.offset + place.spec.num_bytes]

    class MappingEngine(ReceivingEngine):
        async def update_weights(self, weights, version):
            found.update({each.spec.name: read(each) for each in weights.stored})

    within(carry(transport, [MappingEngine()], weights, 3))
    assert {name: array.tobytes() for name, array in weights.items()} == found


@settings(max_examples=25, deadline=None)
@given(weights_of_any_kind, bucket_sizes, st.sampled_from(["none", "crc32", "xxh3"]))
def test_files_carry_weights_of_any_kind(tmp_path_factory, weights, bucket_bytes, checksum):
    """The weights may be none at all, empty, or 0-d. No file is left."""
    folder = tmp_path_factory.mktemp("weights")
    assert_carried(DiskTransport(DiskConfig(bucket_bytes=bucket_bytes, checksum=checksum, directory=folder)), weights)
    assert list(folder.iterdir()) == []


@settings(max_examples=5, deadline=None)
@given(weights_of_any_kind, bucket_sizes, st.sampled_from(["none", "crc32", "xxh3"]))
def test_a_broadcast_carries_weights_of_any_kind(weights, bucket_bytes, checksum):
    """The weights may be none at all, empty, or 0-d."""
    config = BroadcastConfig(bucket_bytes=bucket_bytes, checksum=checksum, timeout_s=60)
    assert_carried(BroadcastTransport(config), weights)


def assert_carried(transport, weights):
    engine = ReceivingEngine()
    received = []

    async def scenario():
        received.extend(await carry(transport, [engine], weights, 3))

    within(scenario())
    assert received == [None]
    assert engine.weight_version == 3
    assert_same({name: np.array(array, order="C") for name, array in weights.items()}, engine.weights)


class GatheredSource:
    """Weights that exist only while they are read, as those gathered from shards; `peak` is the most bytes at once."""

    def __init__(self, specs):
        self.specs, self.peak, self._alive = specs, 0, 0

    def _release(self, num_bytes):
        self._alive -= num_bytes

    def __iter__(self):
        for spec in self.specs:
            array = np.ones(spec.shape, spec.dtype)
            weakref.finalize(array, self._release, array.nbytes)
            self._alive += array.nbytes
            self.peak = max(self.peak, self._alive)
            yield spec.name, array
            del array


@pytest.mark.parametrize(
    "transport",
    [
        SharedMemoryTransport(BucketConfig(bucket_bytes=1 << 12)),
        DiskTransport(DiskConfig(bucket_bytes=1 << 12)),
        BroadcastTransport(BroadcastConfig(bucket_bytes=1 << 12, timeout_s=60)),
    ],
    ids=["shm", "disk", "gloo"],
)
def test_gathered_weights_are_released_one_by_one(transport):
    """The publisher holds two gathered weights at most, however many the model has: the last one and the next."""
    source = GatheredSource([TensorSpec(f"w{i}", (256,), "float32") for i in range(64)])

    async def scenario():
        async with transport.publish(1, source, 1) as manifest:
            await transport.apply(ReceivingEngine(), manifest)

    within(scenario(), 60)
    assert 0 < source.peak <= 2 * 1024


def test_tensors_of_torch_arrive_as_arrays():
    """Views and bfloat16 tensors keep their values."""
    torch = pytest.importorskip("torch")
    tensors = {"view": torch.arange(12.0).reshape(3, 4).T[::2], "half": torch.full((3,), 1.5).bfloat16()}
    engine = ReceivingEngine()

    async def scenario():
        await carry(SharedMemoryTransport(), [engine], tensors, 1)

    within(scenario())
    assert engine.weights["view"].tolist() == tensors["view"].tolist()
    assert (str(engine.weights["half"].dtype), engine.weights["half"].tolist()) == ("bfloat16", [1.5] * 3)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int64"])
def test_a_bucket_on_a_device_is_unpacked_to_tensors(dtype):
    """`nccl` unpacks received buckets this way, on any device."""
    torch = pytest.importorskip("torch")
    tensors = {"matrix": torch.arange(6).reshape(2, 3), "scalar": torch.tensor(7), "empty": torch.empty(0, 4)}
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    source = source_of(tensors)
    ((bucket, buffer),) = fill_buckets(plan_buckets(source.specs, 1 << 20), source, allocate_zeros)
    unpacked = dict(_unpack_on_device(bucket, torch.from_numpy(buffer)))

    assert list(unpacked) == list(tensors)
    for name, tensor in tensors.items():
        assert unpacked[name].dtype == tensor.dtype
        assert torch.equal(unpacked[name], tensor)


@pytest.mark.parametrize("kind", ["crc32", "xxh3"])
@given(data=st.data())
def test_a_checksum_detects_any_flipped_bit(kind, data):
    """Checksums also cover the gaps between weights."""
    source = source_of(some_weights())
    ((bucket, buffer),) = fill_buckets(plan_buckets(source.specs, 1 << 20), source, allocate_zeros)
    published = compute_checksum(buffer, bucket, kind)
    verify_checksum(buffer, bucket, kind, published)

    bit = data.draw(st.integers(0, 8 * bucket.num_bytes - 1))
    buffer[bit // 8] ^= 1 << bit % 8
    with pytest.raises(EngineError, match=f"damaged: the {kind} checksum of the bucket with embed.weight"):
        verify_checksum(buffer, bucket, kind, published)


class Source:
    """A source that announces two float32 vectors, `a` and `b`, and yields other weights."""

    specs = (TensorSpec("a", (2,), "float32"), TensorSpec("b", (2,), "float32"))

    def __init__(self, *weights):
        self.weights = weights

    def __iter__(self):
        return iter(self.weights)


def vector(name, size=2, dtype=np.float32):
    return name, np.zeros(size, dtype)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (Source(vector("a"), vector("c")), r"yields 'c' float32 \[2\], but its specs announce 'b' float32 \[2\]"),
        (Source(vector("a"), vector("b", size=3)), r"yields 'b' float32 \[3\], but"),
        (Source(vector("a"), vector("b", dtype=np.float16)), r"yields 'b' float16 \[2\], but"),
        (Source(vector("a")), "ends before 'b', which its specs announce"),
        (Source(vector("a"), vector("b"), vector("c")), "yields 'c', which its specs do not announce"),
    ],
)
@pytest.mark.parametrize("name", ["shm", "disk"])
def test_a_source_that_contradicts_its_specs_publishes_nothing(name, source, text, tmp_path, segments):
    """The error names the weight, and neither memory nor a file is left."""
    transports = {"shm": SharedMemoryTransport(), "disk": DiskTransport(DiskConfig(directory=tmp_path))}

    async def scenario():
        with pytest.raises(EngineError, match=f"the source of weights {text}"):
            async with transports[name].publish(1, source, 1):
                raise AssertionError("it was published")

    within(scenario())
    assert [path for path in [*segments, *tmp_path.iterdir()] if path.exists()] == []
    assert bool(segments) == (name == "shm")
