"""Pictures in the parts of each dialect: their form, their places in messages, and refusals."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from picture_requests import DIALECTS, url_of, write_body, write_parts, write_result, write_url, write_user

from turnwise.errors import ConfigError, DataError
from turnwise.media import picture_part
from turnwise_gateway.calls import CallRefusedError
from turnwise_gateway.dialects import RequestMemory, find_dialect, read_exchange
from turnwise_gateway.limits import CallLimits, PictureLimits
from turnwise_testing.inputs.vision import make_picture

CAT, DOG = make_picture(color="red"), make_picture(16, 24, "blue", "JPEG")
ASKED = {
    "chat": {
        "role": "assistant",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
    },
    "messages": {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
    "responses": {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
}


def make_memory(check=lambda _picture: None):
    return RequestMemory(CallLimits.of_context(1 << 16, PictureLimits(check, 8)))


def read(dialect, *items, memory=None, **more):
    body = json.dumps(write_body(dialect, items, **more)).encode()
    return read_exchange(find_dialect(dialect), body, {}, memory or make_memory()).call.messages


def refusal(dialect, *items, **options):
    with pytest.raises(CallRefusedError) as refused:
        read(dialect, *items, **options)
    return refused.value


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_message_of_a_user(dialect):
    """All dialects give one form, in the order of the parts; texts beside each other are one part."""
    (message,) = read(dialect, write_user(dialect, write_parts(dialect, ["One", "two", CAT, "", DOG, "three"])))

    parts = [{"type": "text", "text": "One\ntwo"}, picture_part(CAT), picture_part(DOG)]
    assert {"role": "user", "content": [*parts, {"type": "text", "text": "three"}]} == message


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_result_of_a_tool(dialect):
    """It may have pictures in each dialect."""
    asked = write_user(dialect, write_parts(dialect, ["Look."]))
    result = write_result(dialect, "a", write_parts(dialect, ["Seen:", CAT]))
    *_, message = read(dialect, asked, ASKED[dialect], result)

    assert ("tool", "a") == (message["role"], message["tool_call_id"])
    assert [{"type": "text", "text": "Seen:"}, picture_part(CAT)] == message["content"]


@pytest.mark.parametrize("dialect", DIALECTS)
@given(pieces=st.lists(st.sampled_from(["One", "two", "", CAT, DOG]), max_size=9))
def test_the_order_of_a_result(dialect, pieces):
    """Texts and pictures stand in the order of the client; texts beside each other are one part."""
    asked = write_user(dialect, write_parts(dialect, ["Look."]))
    *_, message = read(dialect, asked, ASKED[dialect], write_result(dialect, "a", write_parts(dialect, pieces)))
    texts = "".join(part if isinstance(part, str) else "#" for part in pieces)
    content = message["content"]
    shown = [{"type": "text", "text": content}] if isinstance(content, str) else content
    assert texts == "".join(part.get("text", "#") for part in shown).replace("\n", "")
    pictures = [picture_part(each) for each in pieces if not isinstance(each, str)]
    assert pictures == [part for part in shown if part["type"] == "image_url"]


@pytest.mark.parametrize(("pieces", "begins"), [(["Gone."], "Error: Gone."), (["error 5"], "error 5"), ([], "Error:")])
def test_a_failed_call_with_a_picture(pieces, begins):
    """Its text tells the model, once."""
    block = write_result("messages", "a", write_parts("messages", [*pieces, CAT]))
    block["content"][0]["is_error"] = True
    *_, message = read("messages", write_user("messages", []), ASKED["messages"], block)

    assert [{"type": "text", "text": begins}, picture_part(CAT)] == message["content"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_texts_are_as_before(dialect):
    """A content without pictures is a text, also where the run takes pictures."""
    (message,) = read(dialect, write_user(dialect, write_parts(dialect, ["One", "", "two"])))

    assert {"role": "user", "content": "One\n\ntwo"} == message


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_bytes_tell_the_type(dialect):
    """Equal bytes are the same picture, whatever the client calls them."""
    part = write_url(dialect, url_of(DOG.data, "image/png"))
    (message,) = read(dialect, write_user(dialect, [part]))

    assert [picture_part(DOG)] == message["content"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_nothing_is_fetched(dialect):
    """The URL of another server is refused, and the line says so."""
    error = refusal(dialect, write_user(dialect, [write_url(dialect, "http://127.0.0.1:1/cat.png")]))

    assert "fetched" in error.message
    assert error.param.startswith(("messages[0].content[0]", "input[0].content[0]"))


@pytest.mark.parametrize(
    ("dialect", "part", "param", "reason"),
    [
        ("responses", {"type": "input_image", "file_id": "f"}, "input[0].content[0].file_id", "no files are stored"),
        ("messages", {"type": "image", "source": {"type": "file", "file_id": "f"}}, "source", "the type 'file'"),
        ("messages", {"type": "image"}, "messages[0].content[0].source", "the type 'none'"),
        ("messages", {"type": "image", "source": {"type": "base64"}}, "source.data", "not empty"),
        ("chat", {"type": "image_url"}, "messages[0].content[0].image_url.url", "not empty"),
        ("chat", {"type": "image_url", "image_url": "data:"}, "messages[0].content[0].image_url", "an object"),
        ("chat", {"type": "image_url", "image_url": {"url": "data:image/png,AA"}}, "content[0]", "none is fetched"),
        ("chat", {"type": "image_url", "image_url": {"url": "data:;base64,%"}}, "content[0]", "no base64"),
        ("chat", {"type": "input_audio"}, "content[0]", "texts and parts of type 'image_url' only"),
    ],
)
def test_other_sources(dialect, part, param, reason):
    """Each is refused by its place."""
    error = refusal(dialect, write_user(dialect, [part]))

    assert error.param.endswith(param)
    assert reason in error.message


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("role", ["system", "assistant"])
def test_roles_without_pictures(dialect, role):
    """Instructions and turns of the model have texts alone."""
    message = {"role": role, "content": write_parts(dialect, [CAT])}
    error = refusal(dialect, message, write_user(dialect, write_parts(dialect, ["a"])))

    assert "unsupported" == error.kind
    assert "and the model reads text only" in error.message


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("kind", "expected"), [(DataError, "invalid"), (ConfigError, "unsupported")])
def test_the_check_of_the_run(dialect, kind, expected):
    """Its reason is in the refusal, and the next request with the picture is refused, too."""

    def check(_picture):
        raise kind("picture 12 is broken")

    memory, message = make_memory(check), write_user(dialect, write_parts(dialect, ["a", CAT]))
    for _ in range(2):
        error = refusal(dialect, message, memory=memory)
        assert (expected, True) == (error.kind, "picture 12 is broken" in error.message)
        assert error.param.endswith("[0].content[1]")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_large_files(dialect, monkeypatch):
    """A file beyond the limit is refused before it is read."""
    monkeypatch.setattr("turnwise.media.MAX_PICTURE_BYTES", len(CAT.data) - 1)
    error = refusal(dialect, write_user(dialect, write_parts(dialect, [CAT])))

    assert "bytes" in error.message


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_picture_is_read_once(dialect):
    """Later requests of the session have the same object, also in another place."""
    checked, memory = [], make_memory(lambda picture: checked.append(picture))
    one = write_user(dialect, write_parts(dialect, [CAT]))
    two = write_user(dialect, write_parts(dialect, ["again", CAT]))
    (first,) = read(dialect, one, memory=memory)
    *_, second = read(dialect, two, memory=memory)

    assert [CAT] == checked
    assert first["content"][0] is second["content"][1]


def test_the_memory_of_pictures_has_a_limit(monkeypatch):
    """The oldest is read again."""
    monkeypatch.setattr("turnwise_gateway.dialects.pictures._MAX_KNOWN_CHARS", 2 * len(url_of(CAT.data)) - 1)
    checked, memory = [], make_memory(lambda picture: checked.append(picture))
    for number, picture in enumerate((CAT, DOG, CAT)):
        read("chat", write_user("chat", write_parts("chat", [str(number), picture])), memory=memory)

    assert [CAT, DOG, CAT] == checked


def test_the_limits_of_bodies():
    """They hold as many bytes as the pictures of a record may have; without pictures they are as before."""
    plain, shown = CallLimits.of_context(100), CallLimits.of_context(100, PictureLimits(print, 2))

    assert plain.num_bytes + 2 * (20 << 20) * 4 // 3 < shown.num_bytes
    assert plain.find_excess(shown.num_bytes) is not None
    assert shown.find_excess(shown.num_bytes) is None
