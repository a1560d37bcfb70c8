# SPDX-License-Identifier: Apache-2.0
"""Kimi-VL's processor: patches of a picture of any size, and as many tokens as vLLM expects.

transformers has none. `save_pretrained` copies this file into the checkpoint, and engines run it
with `--trust-remote-code`, so it imports nothing of ours.
"""

import math
from typing import Any

import numpy as np
import torch
from transformers import BaseImageProcessor, BatchFeature, ProcessorMixin


class KimiVLImageProcessor(BaseImageProcessor):
    """Turns pictures into patches; `in_token_limit` bounds the patches of one."""

    model_input_names = ["pixel_values", "image_grid_hws"]

    def __init__(
        self,
        patch_size: int = 14,
        merge_kernel_size: tuple[int, int] = (2, 2),
        in_token_limit: int = 4096,
        **more: Any,
    ) -> None:
        super().__init__(**more)
        self.patch_size = patch_size
        self.merge_kernel_size = list(merge_kernel_size)
        self.in_token_limit = in_token_limit

    def preprocess(self, images: Any, **_: Any) -> BatchFeature:
        """Return the patches of all pictures, and each picture's rows and columns of patches."""
        pictures = images if isinstance(images, list) else [images]
        patches, grids = zip(*map(self._patches, pictures), strict=True)
        data = {"pixel_values": torch.cat(patches), "image_grid_hws": torch.tensor(grids)}
        return BatchFeature(data)

    def _patches(self, picture: Any) -> tuple[torch.Tensor, tuple[int, int]]:
        side = self.patch_size
        num_patches = (picture.width // side) * (picture.height // side)
        if num_patches > self.in_token_limit:
            scale = math.sqrt(self.in_token_limit / num_patches)
            picture = picture.resize((int(picture.width * scale), int(picture.height * scale)))
        pixels = torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1) / 127.5 - 1
        down, right = (
            -length % (kernel * side)
            for length, kernel in zip(pixels.shape[1:], self.merge_kernel_size, strict=True)
        )
        pixels = torch.nn.functional.pad(pixels, (0, right, 0, down))
        rows, columns = pixels.shape[1] // side, pixels.shape[2] // side
        grid = pixels.view(3, rows, side, columns, side).permute(1, 3, 0, 2, 4)
        return grid.reshape(rows * columns, 3, side, side), (rows, columns)


class KimiVLProcessor(ProcessorMixin):
    """Puts as many placeholders into a text as the pictures have tokens."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None
    ) -> None:
        self.image_token = "<|media_pad|>"
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(self, images: Any = None, text: Any = None, **_: Any) -> BatchFeature:
        """Return the inputs of the model."""
        texts = [text] if isinstance(text, str) else list(text)
        media = {} if images is None else self.image_processor(images)
        merged = math.prod(self.image_processor.merge_kernel_size)
        counts = [
            int(rows * columns) // merged for rows, columns in media.get("image_grid_hws", [])
        ]
        pieces = [piece.split(self.image_token) for piece in texts]
        expanded = []
        for first, *others in pieces:
            tokens = [self.image_token * counts.pop(0) + piece for piece in others]
            expanded.append("".join([first, *tokens]))
        return BatchFeature({**self.tokenizer(expanded, return_tensors="pt"), **media})


KimiVLImageProcessor.register_for_auto_class("AutoImageProcessor")
KimiVLProcessor.register_for_auto_class("AutoProcessor")
