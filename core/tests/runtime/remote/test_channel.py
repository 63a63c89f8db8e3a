"""Channels: messages arrive whole and in order, only from peers that know the key, and over TLS if Ray uses it."""

import asyncio
import gc
import pickle
import socket
import subprocess
from contextlib import asynccontextmanager

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.runtime.remote.channel import BrokenChannelError, Channel, ChannelServer, open_channel

HOST = "127.0.0.1"
MESSAGES = st.lists(st.one_of(st.binary(max_size=200), st.integers(0, 300_000).map(bytes), st.text(max_size=9)))


class Heard:
    """Records the events of a server, in order."""

    def __init__(self, reply=False):
        self.events, self.changed, self.sends, self.reply = [], asyncio.Event(), {}, reply
        self.server = ChannelServer(self.on_open, self.on_message, self.on_close)

    def note(self, *event):
        self.events.append(event)
        self.changed.set()

    def on_open(self, number, name, send):
        self.sends[number] = send
        self.note("open", number, name)

    def on_message(self, number, message):
        self.note("message", number, message)
        if self.reply:
            self.sends[number](message)

    def on_close(self, number):
        self.note("close", number)

    async def until(self, *event):
        async with asyncio.timeout(60):
            while event not in self.events:
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def serving(**options):
    heard = Heard(**options)
    try:
        yield heard, await heard.server.open(HOST)
    finally:
        await heard.server.close()


@settings(max_examples=30, deadline=None)
@given(MESSAGES)
def test_messages_arrive_whole_and_in_order(messages):
    """In both directions, however large they are."""

    async def body():
        async with serving(reply=True) as (heard, address):
            channel = await open_channel(address, "a worker")
            for message in messages:
                channel.send(message)
            replies = [await channel.receive() for _ in messages]
            await channel.close()
            await heard.until("close", 0)
            return heard.events, replies

    events, replies = asyncio.run(body())
    assert [("open", 0, "a worker"), *(("message", 0, each) for each in messages), ("close", 0)] == events
    assert messages == replies


def test_arrays_keep_type_and_values():
    """As the tokens of messages need."""

    async def body():
        async with serving(reply=True) as (_heard, address):
            channel = await open_channel(address, "w")
            channel.send(np.arange(5, dtype=np.int32))
            reply = await channel.receive()
            await channel.close()
            return reply

    reply = asyncio.run(body())
    assert (np.int32, [0, 1, 2, 3, 4]) == (reply.dtype, reply.tolist())


def test_channels_have_different_numbers():
    """Two clients may have one name, such as a worker and the one that it replaces."""

    async def body():
        async with serving() as (heard, address):
            first, second = await open_channel(address, "w"), await open_channel(address, "w")
            first.send("a")
            second.send("b")
            await first.close()
            for event in [("message", 0, "a"), ("message", 1, "b"), ("close", 0)]:
                await heard.until(*event)
            assert ("close", 1) not in heard.events
            await second.close()

    asyncio.run(body())


class Harmful:
    """Raises an error where it is unpickled."""

    def __reduce__(self):
        return eval, ("1/0",)


def test_a_client_without_the_key_is_refused():
    """Its check of the server fails. If it sends a message nevertheless, the server does not unpickle it."""

    async def body():
        async with serving() as (heard, address):
            with pytest.raises(ConnectionRefusedError, match="does not know the key"):
                await open_channel(evolve(address, key=bytes(32)), "stranger")
            reader, writer = await asyncio.open_connection(address.host, address.port)
            pickled = pickle.dumps(Harmful())
            writer.write(bytes(32) + bytes(32) + len(pickled).to_bytes(8, "little") + pickled)
            await reader.read()
            writer.close()
            await writer.wait_closed()
            return heard.events

    assert [] == asyncio.run(body())


def test_a_server_without_the_key_is_refused():
    """Another process may have taken the port of a dead replica."""
    sent, ended = [], asyncio.Event()

    async def impostor(reader, writer):
        sent.append(await reader.readexactly(32))
        writer.write(bytes(64) + pickle.dumps(Harmful()))
        sent.append(await reader.read())
        writer.close()
        await writer.wait_closed()
        ended.set()

    async def body():
        async with serving() as (_heard, address):
            false = await asyncio.start_server(impostor, HOST, 0)
            port = false.sockets[0].getsockname()[1]
            with pytest.raises(ConnectionRefusedError, match="the server does not know the key"):
                await open_channel(evolve(address, port=port), "w")
            false.close()
            async with asyncio.timeout(60):
                await ended.wait()

    asyncio.run(body())
    assert 32 == len(sent[0])


def test_a_missing_server_is_an_os_error():
    """So that a client tries again."""

    async def body():
        async with serving() as (heard, address):
            await heard.server.close()
            with pytest.raises(OSError, match="Connect call failed"):
                await open_channel(address, "w")

    asyncio.run(body())


def test_a_translated_address_is_served():
    """The address of a node may be one that no interface of its machine has."""

    async def body():
        heard = Heard(reply=True)
        address = await heard.server.open("203.0.113.7")
        channel = await open_channel(evolve(address, host=HOST), "w")
        channel.send("hello")
        assert "hello" == await channel.receive()
        await channel.close()
        await heard.server.close()
        return address.host

    assert "203.0.113.7" == asyncio.run(body())


def test_an_error_of_a_handler_closes_the_channel(capsys):
    """The client would wait for a reply. The server serves its other clients."""

    async def body():
        async with serving(reply=True) as (heard, address):
            handle = heard.server.on_message

            def refuse(number, message):
                if message == "bad":
                    raise ValueError("cannot handle this")
                handle(number, message)

            heard.server.on_message = refuse
            other, channel = await open_channel(address, "other"), await open_channel(address, "w")
            channel.send("bad")
            with pytest.raises(BrokenChannelError, match=r"the peer says: .*cannot handle this"):
                await channel.receive()
            other.send("good")
            assert "good" == await other.receive()
            await other.close()
            await channel.close()

    asyncio.run(body())
    assert "cannot handle this" in capsys.readouterr().out


def test_a_message_to_a_closed_channel_is_dropped():
    """At both ends: the death of a peer is noticed elsewhere."""

    async def body():
        async with serving() as (heard, address):
            channel = await open_channel(address, "w")
            await heard.until("open", 0, "w")
            await channel.close()
            channel.send("late")
            await heard.until("close", 0)
            heard.sends[0]("late")
            return heard.events

    assert [("open", 0, "w"), ("close", 0)] == asyncio.run(body())


@pytest.fixture
def certificates(tmp_path):
    """Files of an authority and of a node, as Ray's documentation describes them."""

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=tmp_path, check=True, capture_output=True)

    for name in ("ours", "other"):
        authority = ("-keyout", f"{name}-ca.key", "-out", f"{name}.ca", "-subj", f"/CN={name} authority")
        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", *authority)
        node = ("-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl("req", "-newkey", "rsa:2048", "-nodes", *node)
        signer = ("-CA", f"{name}.ca", "-CAkey", f"{name}-ca.key", "-CAcreateserial")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *signer)

    def use(monkeypatch, node, authority):
        monkeypatch.setenv("RAY_USE_TLS", "1")
        monkeypatch.setenv("RAY_TLS_SERVER_CERT", str(tmp_path / f"{node}.crt"))
        monkeypatch.setenv("RAY_TLS_SERVER_KEY", str(tmp_path / f"{node}.key"))
        monkeypatch.setenv("RAY_TLS_CA_CERT", str(tmp_path / f"{authority}.ca"))

    return use


def test_channels_are_encrypted_if_ray_is(certificates, monkeypatch):
    """With Ray's certificates, and both sides must have one of the cluster's authority."""
    certificates(monkeypatch, "ours", "ours")

    async def ask(address):
        channel = await open_channel(address, "stranger")
        await channel.receive()

    async def body():
        async with serving(reply=True) as (heard, address):
            channel = await open_channel(address, "w")
            channel.send("secret")
            assert "secret" == await channel.receive()
            assert "TLS" in channel._writer.get_extra_info("cipher")[1]
            await channel.close()
            await heard.until("close", 0)
            with monkeypatch.context() as patch:
                certificates(patch, "other", "ours")
                with pytest.raises((OSError, EOFError)):
                    await ask(address)
            with monkeypatch.context() as patch:
                patch.setenv("RAY_USE_TLS", "0")
                with pytest.raises((OSError, EOFError)):
                    await open_channel(address, "in the clear")
            return heard.events

    assert [("open", 0, "w"), ("message", 0, "secret"), ("close", 0)] == asyncio.run(body())


class Unreadable:
    """Pickles, and cannot be unpickled."""

    def __reduce__(self):
        return eval, ("1/0",)


class Unsendable:
    """Cannot be pickled."""

    def __reduce__(self):
        raise TypeError("no pickle of this")


def raw(length, content):
    """Return a function that writes bytes which `Channel.send` would not write."""
    return lambda channel: channel._writer.write(length.to_bytes(8, "little") + content)


LIMIT = 2**20
BREAKS = {
    "no pickle": raw(5, b"junk!"),
    "an unknown class": raw(len(b"cnowhere\nNothing\n."), b"cnowhere\nNothing\n."),
    "an error in a constructor": lambda channel: channel.send(Unreadable()),
    "any length": raw(2**63, b"z" * 1000),
    "a byte above the limit": raw(LIMIT + 1, b"z" * 1000),
    "no pickle of it": lambda channel: channel.send(Unsendable()),
    "too long to send": lambda channel: channel.send(bytes(LIMIT)),
}


@pytest.mark.many_cases(4)
@pytest.mark.parametrize("name", [None, "w"], ids=["before the name", "after it"])
@pytest.mark.parametrize("fault", BREAKS)
def test_a_message_that_breaks_a_channel_closes_it_with_one_line(fault, name, capsys, monkeypatch):
    """The other end gets the reason, the server serves others, and no task ends with an unread error."""
    if name is None and "send" in fault:
        pytest.skip("a name is a text")
    failures, sent = [], BREAKS[fault]
    monkeypatch.setattr("turnwise.runtime.remote.channel._MAX_BYTES", LIMIT)
    nameless = pytest.MonkeyPatch()
    if name is None:
        nameless.setattr(Channel, "send", lambda *_: None)

    async def body():
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failures.append(context))
        async with serving(reply=True) as (heard, address):
            channel = await open_channel(address, "w")
            nameless.undo()
            sent(channel)
            with pytest.raises(BrokenChannelError) as caught:
                await channel.receive()
            await channel.close()
            if name:
                await heard.until("close", 0)
            other = await open_channel(address, "other")
            other.send("good")
            assert "good" == await other.receive()
            await other.close()
            gc.collect()
            return str(caught.value)

    text = asyncio.run(body())
    assert "message" in text
    assert [] == failures
    lines = [line for line in capsys.readouterr().out.splitlines() if "channel closed" in line]
    assert (0 if "send" in fault or "of it" in fault else 1) == len(lines)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such option")
def test_both_ends_find_a_peer_that_has_vanished():
    """With idle connections and with data in flight, for which the system sends no keepalive probes."""

    async def body():
        async with serving() as (heard, address):
            channel = await open_channel(address, "w")
            await heard.until("open", 0, "w")
            ends = [channel, heard.sends[0].__self__]
            options = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT]
            sockets = [end._writer.get_extra_info("socket") for end in ends]
            found = [[each.getsockopt(socket.IPPROTO_TCP, option) for option in options] for each in sockets]
            await channel.close()
            return found

    (idle, interval, count, busy_ms), other = asyncio.run(body())
    assert [idle, interval, count, busy_ms] == other
    assert 0 < idle + interval * count <= 30
    assert 0 < busy_ms <= 30_000
