"""Damaged, missing and unwritable weights: the update fails with one line, and the engine keeps its weights."""

import errno
import os
import re
import resource
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from turnwise.errors import EngineError
from turnwise_testing.checks.transport import ReceivingEngine, some_weights, within
from turnwise_weight_transports.config import BroadcastConfig, BucketConfig, DiskConfig
from turnwise_weight_transports.disk import DiskTransport
from turnwise_weight_transports.shm import SharedMemoryTransport


def flip_bit(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    with path.open("r+b") as file:  # in place, because a segment's readers may have mapped it
        file.write(content)


def first_segment(manifest):
    return Path("/dev/shm", manifest.locator["segments"][0])


def first_file(manifest):
    return Path(manifest.locator["files"][0])


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def apply_after(transport, harm, text):
    """Publish, damage the published weights, and expect an error with this text before the engine reads anything."""
    engine = ReceivingEngine()
    engine.weights = {"old": np.ones(1)}

    async def scenario():
        async with transport.publish(1, tuple(some_weights().items()), 1) as manifest:
            harm(manifest)
            with pytest.raises(EngineError, match=text) as caught:
                await transport.apply(engine, manifest)
        assert "\n" not in str(caught.value)

    within(scenario())
    assert (list(engine.weights), engine.names) == (["old"], ())


@pytest.mark.parametrize("kind", ["crc32", "xxh3"])
@pytest.mark.parametrize("name", ["shm", "disk"])
def test_damage_is_found_before_the_engine_is_asked(name, kind, tmp_path):
    """A checksum detects one flipped bit in a segment or in a file."""
    config = {"bucket_bytes": 512, "checksum": kind}
    if name == "shm":
        transport, harm = (
            SharedMemoryTransport(BucketConfig(**config)),
            lambda manifest: flip_bit(first_segment(manifest), 8),
        )
    else:
        transport = DiskTransport(DiskConfig(**config, directory=tmp_path))
        harm = lambda manifest: flip_bit(first_file(manifest), -40)  # noqa: E731 - after the header, in the numbers
    apply_after(transport, harm, f"damaged: the {kind} checksum of the bucket with embed.weight differs")


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (lambda manifest: first_segment(manifest).unlink(), "cannot read weights from /dev/shm: No such file"),
        (lambda manifest: truncate(first_segment(manifest)), "incomplete: 1024 of 2048 bytes of a bucket"),
        (lambda manifest: manifest.locator["segments"].pop(), "incomplete: 1 of 2 buckets"),
    ],
)
def test_missing_memory_is_refused(harm, text):
    """A missing segment, a truncated segment, and a manifest without its last segment are refused."""
    apply_after(SharedMemoryTransport(BucketConfig(bucket_bytes=512)), harm, text)


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (lambda path: path.unlink(), "No such file"),
        (truncate, "cannot read weights"),
        (lambda path: path.write_bytes(b"no safetensors file"), "cannot read weights"),
        (lambda path: save_file({"other": np.zeros(3)}, path), "it holds other weights than were published"),
        (lambda path: save_file({"embed.weight": np.zeros((32, 16), np.float16)}, path), "it holds other weights"),
    ],
)
def test_a_file_that_was_lost_or_replaced_is_refused(harm, text, tmp_path):
    """The error names the file, and needs no checksum."""
    transport = DiskTransport(DiskConfig(bucket_bytes=512, directory=tmp_path))
    pattern = f"cannot read weights from '{re.escape(str(tmp_path))}.*weights-00000.safetensors': .*{text}"
    apply_after(
        transport, lambda manifest: harm(first_file(manifest)), pattern if text != "cannot read weights" else text
    )


def limit_file_size():
    """Refuse to write files of more than 64 KiB, as the system does when a disk is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))


def test_a_full_disk_fails_the_update_and_leaves_no_file(tmp_path, start_peer):
    """The trainer continues, with one line that names the folder and the option."""
    publisher = start_peer("disk", "publish-large", tmp_path, preexec_fn=limit_file_size)
    error = publisher.stdout.readline()

    assert publisher.wait(600) == 0
    assert re.match(f"cannot write weights to '{tmp_path}': .*os error 27.*; .*weight_transport.directory", error)
    assert list(tmp_path.iterdir()) == []


# A private /dev/shm of 64 KiB, for one process. Not every system lets a process make one.
SMALL_SHM = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
SMALL_SHM = (*SMALL_SHM, 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "sh")


def test_full_shared_memory_fails_the_update_and_does_not_kill_the_trainer(start_peer):
    """Writing to a full /dev/shm raises SIGBUS, so the memory is reserved first, with one line when it is not there."""
    if subprocess.run([*SMALL_SHM, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this system lets no process make its own /dev/shm")
    publisher = start_peer("shm", "publish-large", prefix=SMALL_SHM)
    error = publisher.stdout.readline()

    assert publisher.wait(600) == 0
    assert error.startswith("cannot write 524288 bytes of weights to /dev/shm: No space left on device; enlarge it, or")


def test_segments_that_cannot_be_reserved_are_unlinked(monkeypatch, segments):
    """The system's refusal becomes an error of one line, and the segments made so far are gone."""
    reserve = os.posix_fallocate

    def refuse_second(descriptor, offset, size):
        if len(segments) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(descriptor, offset, size)

    async def scenario():
        monkeypatch.setattr(os, "posix_fallocate", refuse_second)
        with pytest.raises(EngineError, match="cannot write 320 bytes of weights to /dev/shm: No space left on device"):
            async with SharedMemoryTransport(BucketConfig(bucket_bytes=512)).publish(1, some_weights(), 1):
                raise AssertionError("it was published")

    within(scenario())
    assert [path.exists() for path in segments] == [False, False]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    """The error also names the option, here when the path of the folder is a file."""
    taken = tmp_path / "taken"
    taken.write_text("")

    async def scenario():
        text = f"cannot write weights to '{taken}': .*; free space there, or set weight_transport.directory"
        with pytest.raises(EngineError, match=text):
            async with DiskTransport(DiskConfig(directory=taken)).publish(1, some_weights(), 1):
                raise AssertionError("it was published")

    within(scenario())


@pytest.mark.parametrize(
    ("config", "options", "name"),
    [
        (BucketConfig, {"bucket_bytes": 0}, "bucket_bytes"),
        (BucketConfig, {"checksum": "md5"}, "checksum"),
        (DiskConfig, {"checksum": "sha1"}, "checksum"),
        (BroadcastConfig, {"host": ""}, "host"),
        (BroadcastConfig, {"port": -1}, "port"),
        (BroadcastConfig, {"port": 65536}, "port"),
        (BroadcastConfig, {"timeout_s": 0}, "timeout_s"),
    ],
)
def test_options_out_of_range_are_named(config, options, name):
    """The error names the option and shows the value."""
    with pytest.raises(ValueError, match=f"'{name}'.*{next(iter(options.values()))}"):
        config(**options)
