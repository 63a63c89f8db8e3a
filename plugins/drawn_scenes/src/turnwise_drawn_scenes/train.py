"""
Trains the model of the drawn scenes from scratch on a CPU.

The first phase uses single turns without slips: the model learns to name a cell and to read a pattern. The second
phase uses whole demonstrations with slips: the model learns their rates, and mostly guesses.
"""

# ruff: noqa: TID253 - only the training imports it, no hook

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import count, islice
from typing import Any, Final

import torch
from attrs import frozen
from PIL import Image
from transformers import PreTrainedTokenizerFast

from turnwise_drawn_scenes.crop import TOOL_SCHEMA, crop
from turnwise_drawn_scenes.demonstrations import SlipRates, Solution, answer_text, call_text, solve
from turnwise_drawn_scenes.drawing import draw
from turnwise_drawn_scenes.scenes import PATTERNS, Scene, generate_scenes
from turnwise_tiny_models import (
    IMAGE_PAD,
    VISION_TOKENS,
    Batch,
    FitConfig,
    Training,
    VisionSizes,
    batched,
    byte_level_tokenizer,
    image_processor,
    pad_demonstrations,
    save_vision,
    tiny_qwen2_5_vl,
    train_command,
)

SHIPPED_SLIPS: Final = SlipRates(at_once=0.6, elsewhere=0.25, misread=0.1)
"""Slip rates of the shipped model; a solver with these rates solves about a third of the tasks."""
MAX_PIXELS: Final = 32 * 32
"""Pixels that the model sees of a picture: a fourth of the width and of the height of a scene."""
TAGS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens that are not special, so `skip_special_tokens` keeps them."""
_VOCAB_SIZE: Final = 384
_MARK: Final = "\x00"
_PICTURE: Final = {"type": "image"}


@frozen
class TrainConfig(FitConfig):
    """
    Hyperparameters of the training.

    Attributes:
        turns_share: share of the steps in the first phase, which has single turns without slips.
        slips: slip rates of the second phase.
    """

    turns_share: float = 0.7
    slips: SlipRates = SHIPPED_SLIPS


_DEFAULTS: Final = TrainConfig(steps=800, batch_size=16, learning_rate=2e-3, warmup_steps=50)

Example = tuple[list[int], list[bool], list[Image.Image]]
"""Ids, whether the model writes each, and the pictures of the placeholders."""


class SceneEncoder:
    """
    Encodes demonstrations as ids with placeholders; each turn is encoded once and appended, as in a rollout.

    Args:
        tokenizer: with this package's chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._processor = processor()
        (self._pad,) = tokenizer.encode(IMAGE_PAD, add_special_tokens=False)
        content = [_PICTURE, {"type": "text", "text": _MARK}]
        self._prompt = self._render({"role": "user", "content": content}, [TOOL_SCHEMA])
        # The engine stops at the end-of-turn token, so the observation starts with the newline that follows it.
        self._observation = "\n" + self._render({"role": "tool", "content": [_PICTURE]}, None)

    def encode(self, scene: Scene, found: Solution) -> Example:
        """Return a whole demonstration: the question, the call and its part if there is one, and the answer."""
        look, read = self.encode_look(scene, found), self.encode_read(scene, found)
        if found.seen is None:
            return look
        return look[0] + read[0], look[1] + read[1], look[2] + read[2]

    def encode_look(self, scene: Scene, found: Solution) -> Example:
        """Return the question and the first turn of a demonstration."""
        turn = found.answer if found.seen is None else call_text(found.seen)
        return self._join(self._prompt.replace(_MARK, scene.question), turn, draw(scene))

    def encode_read(self, scene: Scene, found: Solution) -> Example:
        """Return the part of the picture that a demonstration looks at, and its answer, without the turns before."""
        shape = found.seen or scene.target
        return self._join(self._observation, found.answer, crop(draw(scene), [*shape.box]))

    def _join(self, context: str, turn: str, image: Image.Image) -> Example:
        before = self._tokenizer.encode(context, add_special_tokens=False)
        written = self._tokenizer.encode(turn + str(self._tokenizer.eos_token), add_special_tokens=False)
        return before + written, [False] * len(before) + [True] * len(written), [image]

    def collate(self, examples: Sequence[Example]) -> Batch:
        """Return a batch: ids, pixels, and the grids of the pictures, whose placeholders are multiplied."""
        pictures = self._processor([image for *_, images in examples for image in images], return_tensors="pt")
        counts = iter((pictures["image_grid_thw"].prod(dim=1) // self._processor.merge_size**2).tolist())
        spread = []
        for ids, mask, _images in examples:
            repeats = [next(counts) if each == self._pad else 1 for each in ids]
            spread.append(
                (
                    [i for i, n in zip(ids, repeats, strict=True) for _ in range(n)],
                    [m for m, n in zip(mask, repeats, strict=True) for _ in range(n)],
                )
            )
        inputs, targets = pad_demonstrations(spread)
        places = torch.eq(inputs["input_ids"], self._pad).long()
        return {**inputs, **pictures, "mm_token_type_ids": places}, targets

    def _render(self, message: dict[str, Any], tools: list[Any] | None) -> str:
        text = self._tokenizer.apply_chat_template([message], tools=tools, add_generation_prompt=True, tokenize=False)
        assert isinstance(text, str)
        return text


def processor() -> Any:
    """Return the image processor: it takes the means of squares, so a whole scene shows grey for each pattern."""
    return image_processor(max_pixels=MAX_PIXELS, resampling=Image.Resampling.BOX)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer, trained on questions and demonstrations."""
    template = files("turnwise_drawn_scenes").joinpath("chat_template.jinja").read_text(encoding="utf-8")
    return byte_level_tokenizer(
        _corpus(), _VOCAB_SIZE, tags=TAGS, special_tokens=VISION_TOKENS, chat_template=template, context_length=1024
    )


def build_training(config: TrainConfig) -> Training:
    """Build tokenizer, model and batches."""
    tokenizer = build_tokenizer()
    encoder = SceneEncoder(tokenizer)
    # The usual standard deviation of 0.02 leaves attention even for hundreds of steps in so narrow a model.
    model = tiny_qwen2_5_vl(tokenizer, VisionSizes(num_vision_layers=1, initializer_range=0.1))
    return Training(tokenizer, model, batched(examples(config, encoder), config.batch_size, encoder.collate))


def examples(config: TrainConfig, encoder: SceneEncoder) -> Iterator[Example]:
    """
    Yield an endless stream of demonstrations: turns without slips, and then whole ones with slips.

    A batch of the first phase has one kind of turn, so that short turns are not padded to the length of long ones.
    """
    source = random.Random(config.seed)
    scenes = generate_scenes("train", config.seed)
    for step in count():
        for scene in islice(scenes, config.batch_size):
            if step >= round(config.steps * config.turns_share):
                yield encoder.encode(scene, solve(scene, config.slips, source))
            elif step % 2:
                yield encoder.encode_read(scene, solve(scene, SlipRates(), source))
            else:
                yield encoder.encode_look(scene, solve(scene, SlipRates(), source))


def _corpus() -> Iterator[str]:
    """Yield the texts that the tokenizer is trained on."""
    yield "Tools: crop(left, top, right, bottom)"
    yield "system\nuser\nassistant\n" * 100
    for scene in islice(generate_scenes("train", 0), 500):
        yield scene.question
        yield f"assistant\n{call_text(scene.target)}"
        yield f"assistant\n{answer_text(scene.answer)}"
    yield from PATTERNS


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; None uses `sys.argv`."""
    prog = "python -m turnwise_drawn_scenes.train"
    train_command(
        prog,
        "Train the model of the drawn scenes from scratch on a CPU.",
        _DEFAULTS,
        build_training,
        arguments,
        save=lambda model, tokenizer, folder: save_vision(model, tokenizer, folder, processor()),
    )


if __name__ == "__main__":
    main()
