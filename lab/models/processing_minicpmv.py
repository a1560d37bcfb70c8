# SPDX-License-Identifier: Apache-2.0
"""MiniCPM-V's configuration and processors. A picture is never cut into slices here.

transformers has none. `save_pretrained` copies this file into the checkpoint, and engines run it
with `--trust-remote-code`, so it imports nothing of ours.
"""

from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import BaseImageProcessor, BatchFeature, ProcessorMixin, Qwen3Config
from transformers.models.siglip import SiglipVisionConfig


class MiniCPMVConfig(Qwen3Config):
    """The configuration of version 4.5: a Qwen3 with a `vision_config` and sizes of a resampler."""

    model_type = "minicpmv"

    def __init__(self, vision_config: Any = None, **more: Any) -> None:
        super().__init__(**more)
        fields = vision_config if isinstance(vision_config, dict) else {}
        self.vision_config = SiglipVisionConfig(**fields)


class MiniCPMVImageProcessor(BaseImageProcessor):
    """Turns pictures into rows of patches; each has `image_feature_size` tokens."""

    model_input_names = ["pixel_values", "image_sizes", "tgt_sizes"]
    im_id_start, im_id_end = "<image_id>", "</image_id>"

    def __init__(
        self,
        patch_size: int = 14,
        scale_resolution: int = 112,
        image_feature_size: int = 16,
        max_slice_nums: int = 1,
        **more: Any,
    ) -> None:
        super().__init__(**more)
        self.patch_size = patch_size
        self.scale_resolution = scale_resolution
        self.image_feature_size = image_feature_size
        self.max_slice_nums = max_slice_nums

    def get_sliced_grid(self, image_size: Any, max_slice_nums: int | None = None) -> None:
        """Return the columns and rows of slices: none."""

    def get_slice_image_placeholder(
        self,
        image_size: Any,
        image_idx: int = 0,
        max_slice_nums: int | None = None,
        use_image_id: bool = True,
    ) -> str:
        """Return the text that stands for a picture."""
        number = f"{self.im_id_start}{image_idx}{self.im_id_end}" if use_image_id else ""
        return f"{number}<im_start>{'<unk>' * self.image_feature_size}<im_end>"

    def preprocess(self, images: Any, **_: Any) -> BatchFeature:
        """Return the patches of pictures, which come in a list or, a video's frames, in an array
        for each prompt."""
        by_prompt = [images] if isinstance(images[0], Image.Image) else images
        shown = [[self._patches(picture) for picture in pictures] for pictures in by_prompt]
        return BatchFeature(
            {
                "pixel_values": [[patches for patches, _, _ in each] for each in shown],
                "image_sizes": [[torch.tensor(size) for _, size, _ in each] for each in shown],
                "tgt_sizes": [torch.tensor([grid for _, _, grid in each]) for each in shown],
            }
        )

    def _patches(self, picture: Any) -> tuple[torch.Tensor, tuple[int, int], tuple[int, int]]:
        if not isinstance(picture, Image.Image):
            picture = Image.fromarray(np.asarray(picture))
        size, side = picture.size, self.patch_size
        scale = self.scale_resolution / max(size)
        columns, rows = (max(1, round(length * scale / side)) for length in size)
        picture = picture.convert("RGB").resize((columns * side, rows * side))
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 127.5 - 1
        grid = pixels.view(3, rows, side, columns, side).permute(0, 2, 1, 3, 4)
        return grid.reshape(3, side, rows * columns * side), size, (rows, columns)


class MiniCPMVProcessor(ProcessorMixin):
    """Holds the tokenizer and the picture processor, which a class of vLLM calls."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


MiniCPMVConfig.register_for_auto_class("AutoConfig")
MiniCPMVImageProcessor.register_for_auto_class("AutoImageProcessor")
MiniCPMVProcessor.register_for_auto_class("AutoProcessor")
