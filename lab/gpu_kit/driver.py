# SPDX-License-Identifier: Apache-2.0
"""Facts about this process from CUDA's driver and runtime."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def has_context(number: int) -> bool:
    """Return whether this process has a context on device `number`, without creating one.

    Raises:
        AssertionError: the driver does not answer.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    flags, is_active = ctypes.c_uint(), ctypes.c_int()
    code = driver.cuDevicePrimaryCtxGetState(number, ctypes.byref(flags), ctypes.byref(is_active))
    assert code == 0, f"cuDevicePrimaryCtxGetState: error {code}"
    return bool(is_active.value)


class Pinned:
    """Records the host memory that is pinned meanwhile, except by torch's own allocator."""

    def __init__(self) -> None:
        self.parts: dict[int, int] = {}
        """Bytes by address."""
        self.most_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes that are pinned now."""
        return sum(self.parts.values())

    @contextmanager
    def watching(self) -> Iterator["Pinned"]:
        """Count the memory that the body pins and unpins."""
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
