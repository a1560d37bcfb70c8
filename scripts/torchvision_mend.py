# SPDX-License-Identifier: Apache-2.0
"""Lets a CUDA build of torchvision be imported next to a CPU build of torch.

The package index serves torchvision with CUDA operators only. Next to torch+cpu its library does
not load, so its import ends with "operator torchvision::nms does not exist", and the image
processors of Qwen-VL models need that import. Declaring the two operators' schemas first is
enough: nothing here ever calls them.

`environment.py` copies this file into the environment, with a `.pth` file. It waits for the
first import of torchvision, so that a Python that never imports torchvision pays nothing.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from torch.library import Library

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
libraries: list[Library] = []  # a Library takes its definitions back when it is collected


class BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declares the operators when torchvision is first looked for, and finds nothing itself."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> None:
        """Return None, always: the usual finders then find the real package."""
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            from torch.library import Library  # torch takes seconds: only now

            library = Library("torchvision", "DEF")
            for schema in SCHEMAS:
                library.define(schema)
            libraries.append(library)


sys.meta_path.insert(0, BeforeTorchvision())
