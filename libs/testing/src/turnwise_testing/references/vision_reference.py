"""
The truth for contexts with pictures: one forward pass of a vision-language model of transformers in float32.

Needs torch, transformers and pillow, which are imported when they are needed.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from turnwise.types import FloatArray, GenerateRequest, GenerateResult, Picture, PlacedPicture
from turnwise_testing.probes.pictures import PictureProbe
from turnwise_testing.references.reference_model import TransformersReference


@define(eq=False)
class VisionReference(TransformersReference):
    """The reference of a model directory with an image processor."""

    _processor: Any = field(default=None, init=False)

    def count_tokens(self, picture: Picture) -> int:
        """Return the number of placeholders of a picture."""
        merge = int(self.model(variant=0).config.vision_config.spatial_merge_size)
        return int(self._inputs([picture])["image_grid_thw"].prod()) // merge**2

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
        inputs = self._inputs([each.picture for each in pictures]) if pictures else {}
        # The model takes every id of a placeholder for a part of a picture, also one that was sampled.
        model.model.get_placeholder_mask = lambda *_, **__: (places.bool()[:, :, None], None)
        try:
            with torch.no_grad():
                logits = model(input_ids=ids, mm_token_type_ids=places, use_cache=False, **inputs).logits[0]
        finally:
            del model.model.get_placeholder_mask
        found: NDArray[np.float32] = torch.log_softmax(logits.float() / temperature, dim=-1).numpy()
        return found

    def _inputs(self, pictures: Sequence[Picture]) -> dict[str, Any]:
        from PIL import Image
        from transformers import AutoImageProcessor

        if self._processor is None:
            self._processor = AutoImageProcessor.from_pretrained(self.path, backend="pil")  # type: ignore[no-untyped-call]  # transformers leaves it so
        images = [Image.open(io.BytesIO(picture.data)).convert("RGB") for picture in pictures]
        return dict(self._processor(images=images, return_tensors="pt"))

    def _load(self, variant: int) -> Any:
        import torch
        from transformers import AutoModelForImageTextToText

        if variant:
            return super()._load(variant)
        model: Any = AutoModelForImageTextToText.from_pretrained(self.path, dtype=torch.float32)
        return model.eval()
