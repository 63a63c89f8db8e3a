"""Packets of tasks and results: equal values, each picture once, bounded memory, and any order of arrival."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.media import Picture, PlacedPicture, picture_part
from turnwise.record.result import EpisodeResult
from turnwise.record.spec import EpisodeSpec, UnfinishedEpisode
from turnwise.record.trajectory import Trajectory
from turnwise.runtime.remote.picture_packets import PacketReceiver, PacketSender, show_pictures
from turnwise.runtime.remote.result_wire import has_pictures, pack_episodes, unpack_episodes
from turnwise.types import MediaTokens, Status, Task

PNG = b"\x89PNG\r\n\x1a\n"
PICTURES = [Picture(data=PNG + bytes([number]) * 2000, media_type="image/png") for number in range(5)]
SIZE = len(PICTURES[0].data)


def message(*numbers):
    """Return a message with a text and pictures."""
    return {"role": "user", "content": [{"type": "text", "text": "a"}, *(picture_part(PICTURES[n]) for n in numbers)]}


def record(*numbers):
    """Return a record with pictures in its prompt."""
    pictures = [PlacedPicture(start=2 * place, num_tokens=2, picture=PICTURES[n]) for place, n in enumerate(numbers)]
    found = Trajectory(MediaTokens(token_ids=np.arange(2 * len(numbers) + 1), pictures=pictures))
    found.add_action([7], [-0.5])
    return found


def episode(*numbers, records=(), **options):
    task = Task(messages=(message(*numbers),), uid="t")
    options = {"status": Status.COMPLETED, "messages": task.messages, **options}
    return EpisodeResult(task=task, trajectories=tuple(records), **options)


def sent_as_ray_does(packet):
    return pickle.loads(pickle.dumps(packet))


values = st.recursive(
    st.one_of(
        st.integers(0, 4).map(PICTURES.__getitem__),
        st.integers(0, 4).map(lambda n: picture_part(PICTURES[n])["image_url"]["url"]),
        st.sampled_from(["data:image/", "data:image/png;base64,AAAA", "a text", 3, None]),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("ab"), inner) | st.tuples(inner, inner),
    max_leaves=8,
)


def plain(value):
    """Return a value with names in place of pictures, which are equal by identity alone."""
    match value:
        case Picture():
            return ("picture", value.name, value.data)
        case dict():
            return {key: plain(each) for key, each in value.items()}
        case list() | tuple():
            return type(value)(map(plain, value))
    return value


def pictures_of(value):
    """Yield the names of the pictures of a value, of URLs too."""
    match value:
        case Picture():
            yield value.name
        case dict() | list() | tuple():
            for each in value.values() if isinstance(value, dict) else value:
                yield from pictures_of(each)
        case str():
            yield from (p.name for p in PICTURES if picture_part(p)["image_url"]["url"] == value)


@settings(max_examples=200, deadline=None)
@given(st.lists(values, max_size=8), st.sampled_from([0, SIZE, 3 * SIZE, 10**9]))
def test_any_values(given_values, max_bytes):
    """Values arrive as they were sent, and a picture comes again only if the receiver had to forget it."""
    sender, receiver, held = PacketSender(max_bytes), PacketReceiver(), set()
    packets = []
    for value in given_values:
        packet = sender.pack(value)
        new = [picture.name for picture in packet.pictures]
        assert not held.intersection(new)
        held |= set(new)
        assert set(pictures_of(value)) <= held
        assert len(new) == len(set(new))
        held -= set(packet.forgotten)
        assert len(held) * SIZE <= max_bytes
        packets.append(packet)
    assert list(map(plain, given_values)) == [plain(receiver.unpack(sent_as_ray_does(packet))) for packet in packets]
    assert receiver.num_bytes == len(held) * SIZE


def test_a_picture_of_a_task_travels_once():
    """Its URL in messages and its object in records need its bytes once, and later packets none."""
    sender, receiver = PacketSender(), PacketReceiver()
    sizes = []
    for _ in range(3):
        result = episode(0, 1, records=[record(0, 1, 2)])
        packet = sender.pack((pack_episodes([(4, result)]), []))
        sizes.append(len(pickle.dumps(packet)))
        (message_, _events) = receiver.unpack(sent_as_ray_does(packet))
        ((number, got),) = unpack_episodes(message_)
        assert (4, result.task, result.messages) == (number, got.task, got.messages)
        assert (
            got.messages[0]["content"][1]["image_url"]["url"] is got.task.messages[0]["content"][1]["image_url"]["url"]
        )
        assert [PICTURES[n].data for n in range(3)] == [p.picture.data for p in got.trajectories[0].pictures]
    assert 3 * SIZE < sizes[0] < 3 * SIZE + 4000
    assert sizes[1] == sizes[2] < 4000
    assert (3, 3 * SIZE) == (sender.num_sent, sender.num_sent_bytes)


def test_a_saved_state_travels_with_its_pictures():
    """A spec that resumes an episode is equal at the worker."""
    spec = EpisodeSpec(task=Task(messages=(message(3),), uid="t"), agent_name="a")
    spec = UnfinishedEpisode(spec=spec, messages=(message(3), message(4))).resumed_spec
    packet = PacketSender().pack([(0, spec)])
    ((_number, got),) = PacketReceiver().unpack(sent_as_ray_does(packet))
    assert (spec.task, spec.unfinished.messages) == (got.task, got.unfinished.messages)
    assert [PICTURES[3].name, PICTURES[4].name] == [each.name for each in packet.pictures]


def test_packets_come_in_their_order():
    """Their caller numbers its calls, see `actor_calls`; a packet that comes early is an error."""
    sender = PacketSender()
    _first, second = sender.pack(1), sender.pack(2)
    with pytest.raises(ValueError, match="packet 1 came before packet 0"):
        PacketReceiver().unpack(second)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (episode(), False),
        (episode(messages=({"role": "user", "content": "a"}, {"role": "assistant", "content": None})), False),
        (episode(1), True),
        (episode(messages=(message(1),)), True),
        (episode(records=[record()]), False),
        (episode(records=[record(), record(2)]), True),
    ],
)
def test_results_with_pictures(result, expected):
    """Only these become packets: others travel as they did."""
    assert has_pictures(result) is expected
    unfinished = UnfinishedEpisode(spec=EpisodeSpec(task=result.task, agent_name="a"), messages=(message(1),))
    assert has_pictures(episode(unfinished=unfinished, status=Status.ABORTED))
    assert not show_pictures([{"role": "user"}, {"role": "user", "content": "b"}])
