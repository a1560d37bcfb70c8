# SPDX-License-Identifier: Apache-2.0
"""What CUDA's driver and runtime say of this process."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def has_context(number: int) -> bool:
    """Whether this process has a context on device `number`; asking makes none.

    Raises:
        AssertionError: the driver does not say.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    flags, is_active = ctypes.c_uint(), ctypes.c_int()
    code = driver.cuDevicePrimaryCtxGetState(number, ctypes.byref(flags), ctypes.byref(is_active))
    assert code == 0, f"cuDevicePrimaryCtxGetState: error {code}"
    return bool(is_active.value)


class Pinned:
    """The host memory that is pinned while this watches; what torch pins itself is not seen."""

    def __init__(self) -> None:
        self.parts: dict[int, int] = {}
        """Bytes by address."""
        self.most_bytes = 0

    @property
    def num_bytes(self) -> int:
        """What is pinned now."""
        return sum(self.parts.values())

    @contextmanager
    def watching(self) -> Iterator["Pinned"]:
        """Count what is pinned and unpinned in the body."""
        runtime: Any = torch.cuda.cudart()
        pin, unpin = runtime.cudaHostRegister, runtime.cudaHostUnregister

        def pinned(address: int, num_bytes: int, flags: int) -> Any:  # noqa: ANN401 — its own enum
            code = pin(address, num_bytes, flags)
            if not int(code):
                self.parts[address] = num_bytes
                self.most_bytes = max(self.most_bytes, self.num_bytes)
            return code

        def unpinned(address: int) -> Any:  # noqa: ANN401
            self.parts.pop(address, None)
            return unpin(address)

        runtime.cudaHostRegister, runtime.cudaHostUnregister = pinned, unpinned
        try:
            yield self
        finally:
            runtime.cudaHostRegister, runtime.cudaHostUnregister = pin, unpin
