"""Pictures in verl's forms, against the processors and models of transformers; only one test needs verl."""

import asyncio
import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from turnwise import EpisodeResult, Status, Task, Trajectory, TrajectoryScore
from turnwise.batch.rollout_batch import collate
from turnwise.errors import ConfigError, DataError, EngineError, InfrastructureError
from turnwise.media import read_picture_part
from turnwise.protocols import ModelSpec
from turnwise.record.lineage import RecordLineage
from turnwise.types import GenerateRequest, MediaTokens, PlacedPicture, SamplingParams
from turnwise_testing.inputs.vision import QWEN_3_VL, draw_picture
from turnwise_tiny_models import VISION_TOKENS, byte_level_tokenizer, save_vision, tiny_qwen2_5_vl, tiny_qwen3_vl
from turnwise_verl_bridge.config import VerlEngineConfig
from turnwise_verl_bridge.engine import VerlEngine, build_engine, use_client
from turnwise_verl_bridge.pictures import VisionRows
from turnwise_verl_bridge.rows import to_loop_outputs, to_queue_rows
from turnwise_verl_bridge.runs import build_task

MODELS = {"qwen2_5_vl": tiny_qwen2_5_vl, "qwen3_vl": tiny_qwen3_vl}
PICTURES = (draw_picture(1, 16, 24), draw_picture(2, 32, 16, "JPEG"))


@pytest.fixture(scope="module", params=MODELS)
def directory(request, tmp_path_factory):
    """Return the directory of a tiny vision-language model."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_level_tokenizer(["What is shown?"] * 3, 300, special_tokens=VISION_TOKENS, chat_template=QWEN_3_VL)
    save_vision(MODELS[request.param](tokenizer), tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def model(directory):
    return AutoModelForImageTextToText.from_pretrained(directory)


def processed(directory, pictures=PICTURES):
    """Return what the model's processor computes of images, as verl calls it."""
    from transformers import AutoImageProcessor  # without torchvision, the release that verl has refuses any use of it

    processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
    images = [Image.open(io.BytesIO(picture.data)).convert("RGB") for picture in pictures]
    return processor(images=images, return_tensors="pt"), processor.merge_size**2


def record_of(directory, model, pictures=PICTURES):
    """Return a record: text, the first picture, text and an answer, and the others in an observation."""
    found, merged = processed(directory, PICTURES)
    counts = (found["image_grid_thw"].prod(-1) // merged).tolist()
    pad = model.config.image_token_id

    def with_picture(number):
        ids = [7, 8, *[pad] * counts[number], 9]
        return MediaTokens(
            token_ids=ids, pictures=[PlacedPicture(start=2, num_tokens=counts[number], picture=pictures[number])]
        )

    record = Trajectory(with_picture(0) if pictures else [7, 8, 9])
    record.add_action([11, 12], [-0.5, -0.5])
    for number in range(1, len(pictures)):
        record.add_observation(with_picture(number))
        record.add_action([13], [-0.5])
    return record


def episode_of(record):
    return EpisodeResult(
        task=Task(messages=({"role": "user", "content": "?"},), uid="t"),
        status=Status.COMPLETED,
        trajectories=(record,),
        scores=(TrajectoryScore(value=1.0),),
        lineage=(RecordLineage(),),
    )


def verl_positions(model, ids, grids):
    """Return positions as verl's `_compute_position_ids` does, for a row without pads."""
    types = (ids == model.config.image_token_id).long()
    axes, _delta = model.model.get_rope_index(ids, types, image_grid_thw=grids, attention_mask=torch.ones_like(ids))
    return torch.cat([torch.arange(ids.shape[1])[None, None], axes.transpose(0, 1)], dim=1)[0]


def test_rows(directory, model):
    """They have the arrays of the model's processor, and positions on four axes."""
    record = record_of(directory, model)
    (row,) = to_queue_rows(collate([episode_of(record)], pad_token_id=0), episode_of(record), VisionRows(directory))
    expected, _merged = processed(directory)
    inputs = row["multi_modal_inputs"]
    assert {"pixel_values", "image_grid_thw", "images_seqlens"} == set(inputs)
    assert torch.equal(expected["pixel_values"], inputs["pixel_values"])
    assert torch.equal(expected["image_grid_thw"], inputs["image_grid_thw"])
    assert expected["image_grid_thw"][:, 1:].prod(-1).tolist() == inputs["images_seqlens"].tolist()
    ids = row["input_ids"][None]
    assert torch.equal(verl_positions(model, ids, expected["image_grid_thw"]), row["position_ids"])


def test_a_forward_pass_takes_a_row(directory, model):
    """The model gives the same logits for it as for what verl would compute."""
    record = record_of(directory, model)
    vision, ids = VisionRows(directory), torch.tensor(record.input_ids).long()[None]
    inputs = vision.inputs(record)
    arrays = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
    with torch.no_grad():
        found = model(input_ids=ids, position_ids=vision.positions(record)[1:, None], **arrays).logits
        types = (ids == model.config.image_token_id).long()
        own = model(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=types, **arrays).logits
    torch.testing.assert_close(own, found)


def test_rows_of_text_of_the_same_model(directory, model):
    """They have four axes too, so that a batch has one shape, and no inputs."""
    record = record_of(directory, model, ())
    (row,) = to_queue_rows(collate([episode_of(record)], pad_token_id=0), episode_of(record), VisionRows(directory))
    assert row["multi_modal_inputs"] == {}
    assert [list(range(len(record)))] * 4 == row["position_ids"].tolist()


def test_padded_positions(directory, model):
    """Pads on both sides have 1, as in verl."""
    record, vision = record_of(directory, model), VisionRows(directory)
    batch = collate([episode_of(record)], pad_token_id=0, prompt_length=40, response_length=60)
    (padded,) = vision.padded_positions([record], batch.attention_mask)
    mask = batch.attention_mask[0].bool()
    assert torch.equal(vision.positions(record), padded[:, mask])
    assert (padded[:, ~mask] == 1).all()
    assert not mask.all()


def test_a_sampled_placeholder(directory, model):
    """verl would take it for a picture."""
    record = record_of(directory, model)
    record.add_action([model.config.image_token_id], [-0.5])
    with pytest.raises(InfrastructureError, match="placeholders without a picture"):
        VisionRows(directory).inputs(record)


def test_a_model_without_pictures(directory, model):
    """Its rows are as before, and one with pictures is refused."""
    record = record_of(directory, model, ())
    (row,) = to_queue_rows(collate([episode_of(record)], pad_token_id=0), episode_of(record))
    assert (row["position_ids"].dim(), row["multi_modal_inputs"]) == (1, {})
    shown = episode_of(record_of(directory, model))
    with pytest.raises(ConfigError, match="a record has pictures"):
        to_queue_rows(collate([shown], pad_token_id=0), shown)


class Servers:
    """Notes the options of requests."""

    def __init__(self):
        self.options = []

    async def generate(self, request_id, *, prompt_ids, sampling_params, **options):
        self.options.append(options)
        return SimpleNamespace(token_ids=[3], log_probs=[-0.5], stop_reason="completed", extra_fields={})


def test_servers_get_images(directory, model):
    """With the placeholders in the ids; a request of text is as before."""
    servers, record = Servers(), record_of(directory, model)
    with use_client(servers) as built:
        engine = build_engine(VerlEngineConfig(), ModelSpec(path=directory))
    assert [engine] == built
    assert engine.capabilities.pictures
    for each in (record, record_of(directory, model, ())):
        request = GenerateRequest(
            request_id="r",
            trajectory_id="t",
            token_ids=each.input_ids,
            sampling=SamplingParams(max_tokens=1),
            pictures=each.pictures,
        )
        asyncio.run(engine.generate(request))
    with_pictures, text = servers.options
    sizes = [(image.mode, image.size) for image in with_pictures["image_data"]]
    assert [("RGB", (24, 16)), ("RGB", (16, 32))] == sizes
    assert {} == text
    blind = VerlEngine(VerlEngineConfig(), servers)
    assert not blind.capabilities.pictures
    with pytest.raises(EngineError, match="takes no pictures"):
        asyncio.run(blind.generate(request.__class__(**{**vars_of(request), "pictures": record.pictures})))


def vars_of(request):
    return {"request_id": "r", "trajectory_id": "t", "token_ids": request.token_ids, "sampling": request.sampling}


@pytest.mark.parametrize("held", ["image", "bytes", "struct"])
def test_messages_of_a_data_set(held):
    """Images of pillow keep their pixels, and bytes stay as they are."""
    picture = PICTURES[0]
    image = Image.open(io.BytesIO(picture.data))
    value = {"image": image, "bytes": picture.data, "struct": {"bytes": picture.data, "path": None}}[held]
    content = [{"type": "image", "image": value}, {"type": "text", "text": "Which?"}]
    task = build_task({"raw_prompt": [{"role": "user", "content": content}, {"role": "user", "content": "b"}]}, "u")
    part, text = task.messages[0]["content"]
    assert (text, task.messages[1]["content"]) == (content[1], "b")
    read = read_picture_part(part)
    assert held == "image" or read.data == picture.data
    np.testing.assert_array_equal(np.asarray(image.convert("RGB")), np.asarray(Image.open(io.BytesIO(read.data))))


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image", "image": "cat.png"}, "must be an image of pillow, or have bytes"),
        ({"type": "image"}, "must be an image of pillow, or have bytes"),
        ({"type": "image", "image": PICTURES[0].data, "max_pixels": 9}, "has max_pixels: set it in the model's"),
    ],
)
def test_odd_parts_of_a_data_set(part, reason):
    """The line says how to give the picture."""
    with pytest.raises(DataError, match=reason):
        build_task({"raw_prompt": [{"role": "user", "content": [part]}]}, "u")


@pytest.mark.verl
def test_outputs_of_loops():
    """verl computes inputs and positions itself, of the images."""
    pytest.importorskip("verl", reason="verl is not installed here: see plugins/verl_bridge/README.md")
    places = [PlacedPicture(start=2 * number, num_tokens=2, picture=each) for number, each in enumerate(PICTURES)]
    record = Trajectory(MediaTokens(token_ids=[5] * 5, pictures=places))
    record.add_action([11, 12], [-0.5, -0.5])
    (output,) = to_loop_outputs(episode_of(record))
    assert [(24, 16), (16, 32)] == [image.size for image in output.multi_modal_data["images"]]
