"""
The truth for contexts with pictures: one forward pass of a vision-language model of transformers in float32.

Needs torch, transformers and pillow, which are imported when they are needed.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from turnwise.types import FloatArray, GenerateRequest, GenerateResult, Picture, PlacedPicture
from turnwise_testing.probes.pictures import PictureProbe
from turnwise_testing.references.reference_model import TransformersReference

_MARK = 8
"""The first of the ids that it writes between the tiles of a picture, where a family has such marks."""


@define(eq=False)
class VisionReference(TransformersReference):
    """The reference of a model directory with an image processor."""

    _processor: Any = field(default=None, init=False)

    def count_tokens(self, picture: Picture) -> int:
        """Return the number of tokens of a picture, from its first placeholder to its last."""
        return len(self.write(picture))

    def write(self, picture: Picture) -> list[int]:
        """Return the ids of a picture: its placeholders, and the ids among them."""
        import torch

        model = self.model(variant=0)
        with torch.no_grad():
            found = model.model.get_image_features(**self.inputs([picture])).pooler_output
        if not self._has_marks:
            return [self.placeholder] * sum(each.shape[:-1].numel() for each in found)
        ids: list[int] = []
        for number, tile in enumerate(found):
            ids += [_MARK + number] * (number > 0) + [self.placeholder] * len(tile)
        return ids

    @property
    def _has_marks(self) -> bool:
        return hasattr(self.model(variant=0).model, "inputs_merger")

    def probe(self, pictures: Sequence[Picture]) -> PictureProbe:
        """Return the probe of some pictures, of which the first two have equally many placeholders."""
        num_tokens = tuple(map(self.count_tokens, pictures))
        return PictureProbe(
            pictures=tuple(pictures), num_tokens=num_tokens, placeholder=self.placeholder, reference=self
        )

    def expect_logprobs(
        self,
        request: GenerateRequest,
        result: GenerateResult,
        *,
        variant: int = 0,
        part: slice | NDArray[np.bool_] = slice(None),
    ) -> None:
        """
        Compare the log-probabilities of sampled tokens with one forward pass.

        Args:
            request: with its pictures and its temperature.
            result: of an engine.
            variant: of the weights.
            part: the sampled tokens that are compared.

        Raises:
            AssertionError: one of them differs by more than 1e-4.
        """
        ids = [*request.token_ids.tolist(), *result.token_ids.tolist()]
        num_context, temperature = len(request.token_ids), request.sampling.temperature
        expected, _ = self.scores(ids, num_context, temperature=temperature, variant=variant, pictures=request.pictures)
        np.testing.assert_allclose(result.logprobs[part], expected[part], atol=1e-4, rtol=0)

    @property
    def placeholder(self) -> int:
        """The id of the placeholder."""
        return int(self.model(variant=0).config.image_token_id)

    def scores(
        self,
        token_ids: Sequence[int],
        num_context: int,
        *,
        temperature: float,
        variant: int,
        pictures: Sequence[PlacedPicture] = (),
    ) -> tuple[FloatArray, FloatArray]:
        """Return the (n,) log-probabilities of the ids after the context, and of the best ids in their places."""
        import torch

        logprobs = torch.from_numpy(self.all_logprobs(token_ids, temperature, variant, pictures)[num_context - 1 : -1])
        chosen = logprobs.gather(1, torch.tensor(list(token_ids[num_context:]))[:, None])[:, 0]
        return chosen.numpy(), logprobs.max(dim=-1).values.numpy()

    def all_logprobs(
        self, token_ids: Sequence[int], temperature: float, variant: int, pictures: Sequence[PlacedPicture]
    ) -> NDArray[np.float32]:
        """Return the (n, V) log-probabilities behind each id."""
        import torch

        model, ids = self.model(variant=variant), torch.tensor([list(token_ids)])
        places = torch.zeros_like(ids)
        for each in pictures:
            places[0, each.start : each.stop] = 1
        places[ids != self.placeholder] = 0
        inputs = self.inputs([each.picture for each in pictures]) if pictures else {}
        with torch.no_grad():
            logits = self._logits(model, ids, places, inputs)
        found: NDArray[np.float32] = torch.log_softmax(logits.float() / temperature, dim=-1).numpy()
        return found

    def plain_logprobs(self, token_ids: Sequence[int], pictures: Sequence[Picture]) -> NDArray[np.float32]:
        """Return what `all_logprobs` does if no placeholder is text: by the model alone, as transformers documents."""
        import torch

        with torch.no_grad():
            logits = self.model(variant=0)(torch.tensor([list(token_ids)]), **self.inputs(pictures)).logits[0]
        found: NDArray[np.float32] = torch.log_softmax(logits.float(), dim=-1).numpy()
        return found

    @staticmethod
    def _logits(model: Any, ids: Any, places: Any, inputs: dict[str, Any]) -> Any:
        import torch

        if not hasattr(model.model, "get_rope_index"):
            embedded = model.get_input_embeddings()(ids)
            if inputs:
                found = model.model.get_image_features(**inputs).pooler_output
                embedded[places.bool()] = torch.cat([each.reshape(-1, each.shape[-1]) for each in found])
            return model(inputs_embeds=embedded, use_cache=False).logits[0]
        # The model takes every id of a placeholder for a part of a picture, also one that was sampled.
        model.model.get_placeholder_mask = lambda *_, **__: (places.bool()[:, :, None], None)
        try:
            return model(input_ids=ids, mm_token_type_ids=places, use_cache=False, **inputs).logits[0]
        finally:
            del model.model.get_placeholder_mask

    def inputs(self, pictures: Sequence[Picture]) -> dict[str, Any]:
        """Return the model's arguments for some pictures, as its image processor computes them."""
        from PIL import Image
        from transformers import AutoImageProcessor

        if self._processor is None:
            self._processor = AutoImageProcessor.from_pretrained(self.path, backend="pil")  # type: ignore[no-untyped-call]  # transformers leaves it so
        images = [Image.open(io.BytesIO(picture.data)).convert("RGB") for picture in pictures]
        model = self.model(variant=0)
        cut = {"crop_to_patches": True} if model.config.model_type == "internvl" else {}
        known = inspect.signature(model.forward).parameters
        found = self._processor(images=images, return_tensors="pt", **cut)
        return {name: value for name, value in found.items() if name in known}

    def _load(self, variant: int) -> Any:
        import torch
        from transformers import AutoModelForImageTextToText

        if variant:
            return super()._load(variant)
        model: Any = AutoModelForImageTextToText.from_pretrained(self.path, dtype=torch.float32)
        return model.eval()
