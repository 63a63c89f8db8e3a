"""Messages with pictures: ids and places as the processors of transformers have them, over whole conversations."""

import io
import json
import random
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from picture_families import FAMILIES, REFUSED_FAMILIES, Family, family_params, require_packages, save_family
from PIL import Image

from turnwise.errors import ConfigError, DataError, TemplateError
from turnwise.media import picture_part, read_picture
from turnwise.protocols import ModelSpec, PictureChat
from turnwise.record.trajectory import Trajectory
from turnwise.types import MediaTokens, Picture
from turnwise_chat_templates import ChatTemplate, load_chat
from turnwise_chat_templates.pictures import load_processor
from turnwise_chat_templates.processor_proof import placeholder_ids
from turnwise_testing.inputs.tokenizers import byte_tokenizer
from turnwise_testing.inputs.vision import QWEN_3_VL, make_picture, save_qwen


@pytest.fixture(params=family_params())
def family(request: pytest.FixtureRequest) -> Family:
    family = FAMILIES[request.param]
    require_packages(family)
    return family


def chat_of(folder: Path, **options) -> ChatTemplate:
    return load_chat(ModelSpec(path=folder), **options)


def message(role: str, *parts: str | Picture, **keys) -> dict:
    """Return a message in the OpenAI form; a single text is no list."""
    if parts and all(isinstance(part, str) for part in parts):
        return {"role": role, "content": "".join(map(str, parts)), **keys}
    content = [{"type": "text", "text": p} if isinstance(p, str) else picture_part(p) for p in parts]
    return {"role": role, "content": content, **keys}


def whole_ids(folder: Path, messages: list[dict], chat: ChatTemplate) -> list[int]:
    """Return the ids that the model's own processor makes of a conversation."""
    from turnwise.media import is_picture_part, read_picture_part

    tokenizer = chat.tokenizer._tokenizer
    processor = load_processor(folder, tokenizer)
    processor.chat_template = tokenizer.chat_template
    if hasattr(processor, "video_processor") and processor.video_processor is None:
        processor.video_processor = SimpleNamespace(num_frames=0, fps=0)  # SmolVLM asks it for defaults
    plain, images = [], []
    for each in messages:
        content = each["content"]
        if isinstance(content, list):
            parts = []
            for part in content:
                if is_picture_part(part):
                    image = Image.open(io.BytesIO(read_picture_part(part).data))
                    images.append(image)
                    parts.append({"type": "image", "image": image})
                else:
                    parts.append(part)
            content = parts
        else:
            content = [{"type": "text", "text": content}]
        plain.append({**each, "content": content})
    found = processor.apply_chat_template(plain, tokenize=True, add_generation_prompt=True, return_dict=True)
    ids = found["input_ids"]
    return [int(x) for x in np.asarray(ids).ravel()]


def random_parts(rng: random.Random, number: int) -> list[str | Picture]:
    """Return texts and pictures in random order, of random sizes."""
    parts: list[str | Picture] = [f"turn {number}"]
    for _ in range(rng.randint(0, 2)):
        size = (rng.randint(9, 90), rng.randint(9, 90))
        parts.insert(rng.randint(0, len(parts)), make_picture(*size, color=rng.choice(["red", "green", "blue"])))
    return parts


@pytest.mark.parametrize("seed", range(3))
def test_ten_turns_are_the_rendering_of_the_whole(tmp_path, family, seed):
    """The ids of a record that grew by turns are those of the processor, and each place is the picture's."""
    chat = chat_of(family.save(tmp_path))
    assert isinstance(chat, PictureChat)
    rng = random.Random(seed)
    messages = [message("user", *random_parts(rng, 0))]
    record = Trajectory(chat.picture_prompt(messages))
    for number in range(1, 11):
        is_tool = family.has_tools and rng.random() < 0.5
        text = f"answer {number}"
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {}}}
        turn = {"role": "assistant", "content": text} | ({"tool_calls": [call]} if is_tool else {})
        messages.append(turn)
        shown = text + ('\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>' if is_tool else "")
        sampled = chat.tokenizer.encode(family.lead + shown + family.end)
        record.add_action(sampled, np.zeros(len(sampled)))
        keys = {"tool_call_id": "c", "name": "look"} if is_tool else {}
        new = [message("tool" if is_tool else "user", *random_parts(rng, number), **keys)]
        messages += new
        record.add_observation(chat.picture_delta(new, int(record.input_ids[-1]), with_tools=False))
    assert record.input_ids.tolist() == whole_ids(tmp_path, messages, chat)
    shown = [read_picture_of(part) for each in messages for part in picture_parts(each)]
    assert [each.picture.key for each in record.pictures] == shown
    pad = chat.tokenizer.encode(family.placeholder)[0]
    where = np.flatnonzero(record.input_ids == pad)
    inside = [i for each in record.pictures for i in range(each.start, each.stop)]
    assert set(where.tolist()) <= set(inside)
    assert family.has_tiles or where.tolist() == inside
    assert not record.response_mask[where[where >= record.num_prompt_tokens] - record.num_prompt_tokens].any()


def picture_parts(each: dict) -> list[dict]:
    content = each["content"]
    return [part for part in content if part["type"] == "image_url"] if isinstance(content, list) else []


def read_picture_of(part: dict) -> str:
    from turnwise.media import read_picture_part

    return read_picture_part(part).key


@pytest.mark.parametrize("name", REFUSED_FAMILIES)
def test_families_that_cannot_be_appended(tmp_path, name):
    """They end the run with one line that names the class, and no record has other ids than the processor's."""
    save, reason = REFUSED_FAMILIES[name]
    chat = chat_of(save(tmp_path))
    shown = [message("user", "Look:", make_picture())]
    for ask in (chat.picture_prompt, chat.picture_prompt, lambda _shown: chat.check_picture(make_picture())):
        with pytest.raises(ConfigError, match=reason) as caught:
            ask(shown)
        assert "Processor" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed, so nothing lacks it")
@pytest.mark.parametrize("name", ["Gemma4", "Llama4"])
def test_a_processor_that_needs_torchvision(tmp_path, name):
    """The line says so, for a processor that imports it and for an image processor that does."""
    save_family(tmp_path, name, "<image>")
    with pytest.raises(ConfigError, match="it may need `pip install torchvision`"):
        chat_of(tmp_path).check_picture(make_picture())


def test_the_config_of_the_model_names_the_placeholder(tmp_path):
    """The model puts features at this id, whatever other tokens the processor writes for a picture."""
    save_qwen(tmp_path)
    chat = chat_of(tmp_path)
    (mark,) = chat.tokenizer.encode("<|image_pad|>")
    config = {"image_token_id": mark}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert next(placeholder_ids(tmp_path, None, None)) == mark


def test_messages_without_pictures_have_the_same_ids(tmp_path, family):
    """Also with a closed turn before them."""
    chat = chat_of(family.save(tmp_path))
    asked = [message("user", "What is it?")]
    assert np.array_equal(chat.prompt(asked), chat.picture_prompt(asked))
    stop = chat.stop_token_ids[0]
    assert np.array_equal(chat.delta(asked, stop, with_tools=False), chat.picture_delta(asked, stop, with_tools=False))


def test_the_methods_for_texts_refuse_pictures(tmp_path):
    """An agent that does not take pictures loses none in silence."""
    chat = chat_of(save_qwen(tmp_path))
    shown = [message("user", "Look:", make_picture())]
    for render in (chat.prompt, chat.shown_messages, lambda given: chat.delta(given, chat.stop_token_ids[0])):
        with pytest.raises(TemplateError, match="may hold parts of type 'text' only, not 'image_url'"):
            render(shown)


def test_a_model_without_a_processor_refuses_pictures(tmp_path):
    """The error ends the run and not one episode."""
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="the model takes no pictures"):
        chat_of(tmp_path).picture_prompt([message("user", make_picture())])


def test_a_text_that_spells_a_placeholder_is_a_text(tmp_path):
    """A content cannot forge a picture; with `parse` the chat refuses it."""
    shown = [message("user", "<|image_pad|>", make_picture(16, 16))]
    found = chat_of(save_qwen(tmp_path)).picture_prompt(shown)
    assert isinstance(found, MediaTokens)
    assert len(found.pictures) == 1
    with pytest.raises(TemplateError, match="shows 2 pictures of 1"):
        chat_of(tmp_path, special_tokens="parse").picture_prompt(shown)


def test_a_template_that_counts_pictures_is_refused(tmp_path):
    """A delta cannot know the number of earlier pictures."""
    counting = "{%- set seen = namespace(value=0) %}" + QWEN_3_VL.replace(
        "{%- for message in messages %}\n    {%- if message.role == 'user'",
        "{%- for message in messages %}\n    {%- for part in message.content if message.content is not string and "
        "part.type == 'image' %}{%- set seen.value = seen.value + 1 %}{%- endfor %}"
        "\n    {{- 'Seen ' ~ seen.value if message.content is not string else '' }}\n    {%- if message.role == 'user'",
    )
    chat = chat_of(save_qwen(tmp_path, counting))
    with pytest.raises(TemplateError, match="read differently after a picture"):
        chat.picture_delta([message("user", "Look:", make_picture())], chat.stop_token_ids[0], with_tools=False)


def test_a_template_that_hides_pictures_is_refused(tmp_path):
    """The text says how many are shown."""
    chat = chat_of(save_qwen(tmp_path, QWEN_3_VL.replace("<|vision_start|><|image_pad|><|vision_end|>", "")))
    with pytest.raises(TemplateError, match="shows 0 pictures of 1"):
        chat.picture_prompt([message("user", "Look:", make_picture())])


def saved(image: Image.Image, form: str = "PNG", **options) -> Picture:
    file = io.BytesIO()
    image.save(file, form, **options)
    return read_picture(file.getvalue())


def turned() -> Picture:
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved(Image.new("RGB", (8, 8)), "JPEG", exif=exif)


def animated(form: str) -> Picture:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    return saved(frames[0], form, save_all=True, append_images=frames[1:])


REFUSED = {
    "broken": (lambda: read_picture(make_picture().data[:60]), "is broken: "),
    "gif": (lambda: animated("GIF"), "has 2 frames; give one of them"),
    "webp": (lambda: animated("WEBP"), "has 2 frames"),
    "apng": (lambda: animated("PNG"), "has 2 frames"),
    "turned": (turned, "has the EXIF orientation 6: turn its pixels"),
    "large": (lambda: make_picture(101, 100), "has 101 x 100 pixels, more than the 10000 of max_picture_pixels"),
    "no picture": (lambda: read_picture(b"BM no picture at all"), "is broken: "),
    "no header": (lambda: read_picture(make_picture().data[:12]), "is broken: its header cannot be read"),
    "bomb": (lambda: read_picture(bomb()), "pixels, more than the 10000|more pixels than the 10000"),
    "thin": (lambda: make_picture(2000, 2), "refuses a picture"),
}


def bomb() -> bytes:
    """Return a PNG whose header promises 60,000 x 60,000 pixels."""
    import struct
    import zlib

    data = bytearray(make_picture().data)
    data[16:24] = struct.pack(">II", 60_000, 60_000)
    data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))
    return bytes(data)


@pytest.mark.parametrize("kind", REFUSED)
def test_pictures_that_cannot_be_used(tmp_path, kind):
    """Each has one line, from the prompt and from the check that agents make of the pictures of tools."""
    make, reason = REFUSED[kind]
    chat = chat_of(save_qwen(tmp_path), max_picture_pixels=10_000)
    picture = make()
    with pytest.raises(DataError, match=reason):
        chat.picture_prompt([message("user", picture)])
    with pytest.raises(DataError, match=reason) as caught:
        chat.check_picture(picture)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_forms_of_files(tmp_path, form):
    """Still pictures of all known types are shown; their bytes stay as they are."""
    chat = chat_of(save_qwen(tmp_path))
    picture = make_picture(24, 16, form=form)
    found = chat.picture_prompt([message("user", picture)])
    assert isinstance(found, MediaTokens)
    assert [picture] == [each.picture for each in found.pictures]
    assert found.pictures[0].num_tokens == 6
