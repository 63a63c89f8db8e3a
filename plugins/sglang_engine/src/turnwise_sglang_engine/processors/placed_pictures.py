"""
SGLang's processor of pictures whose arrays and places are known. Only SGLang's process imports this module.

SGLang's own module for these models imports kernels of all models of the family, some of which a CPU has no build of.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput
from sglang.srt.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from sglang.srt.models.qwen3_vl import Qwen3VLForConditionalGeneration
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

from turnwise_sglang_engine.served_pictures import Grid, ServedPicture, picture_positions


class PlacedPictureProcessor(BaseMultimodalProcessor):  # type: ignore[misc]  # SGLang is not installed for mypy
    """Gives SGLang the arrays of a request, at its places."""

    models = (Qwen2_5_VLForConditionalGeneration, Qwen3VLForConditionalGeneration)
    # The arrays are here already, so there is nothing for threads to do.
    auto_mm_processor_worker_num = 1

    async def process_mm_data_async(
        self, image_data: Sequence[ServedPicture], *, input_text: Sequence[int], **_options: object
    ) -> MultimodalProcessorOutput:
        """
        Return SGLang's input of a context with pictures.

        Args:
            image_data: the pictures, in their order.
            input_text: the ids of the context.
        """
        token_ids = list(input_text)
        items = [_make_item(each) for each in image_data]
        merge = self.hf_config.vision_config.spatial_merge_size
        grids = [_grid(each, merge) for each in image_data]
        positions = torch.from_numpy(picture_positions(len(token_ids), [each.place for each in image_data], grids))
        return MultimodalProcessorOutput(
            mm_items=self._prepare_mm_items_for_transport(items),
            input_ids=token_ids,
            padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(token_ids, items),
            im_token_id=self.hf_config.image_token_id,
            # With the next token's: after a retraction SGLang counts on from the last one, which may be in a picture.
            mrope_positions=positions,
            mrope_position_delta=(positions[:1, -1:] - len(token_ids)),
        )


def _grid(picture: ServedPicture, merge: int) -> Grid:
    time, height, width = picture.arrays.grid.tolist()
    return time, height // merge, width // merge


def _make_item(picture: ServedPicture) -> MultimodalDataItem:
    item = MultimodalDataItem(
        modality=Modality.IMAGE,
        feature=picture.arrays.pixel_values,
        offsets=[(picture.place.start, picture.place.stop - 1)],
        model_specific_data={"image_grid_thw": picture.arrays.grid[None]},
    )
    # Names the picture in the prefix cache, where it is in place of its placeholders' ids.
    item.set_identity(bytes.fromhex(picture.place.picture.key))
    return item
