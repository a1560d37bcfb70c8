# SPDX-License-Identifier: Apache-2.0
"""Fewer bytes for an object in the store, without loss: the exponents of numbers are compressed.

Only the exponent bits of a number compress well: the sign and the mantissa look like noise, and
compressing them costs time without a gain. So each number is rotated by one bit, which moves the
sign to the end. Its most significant byte then holds the exponent (of BF16 and F32, all of it).
These bytes are compressed with zstd. All others are stored as they are. docs/format.md is
normative.

A packed object is an object like any other: its checksum and its MAC cover the packed bytes. Host
caches keep objects unpacked, so each object is unpacked once per host.
"""

from typing import Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Struct

from ecshare.store.errors import ConfigError, ObjectCorrupt
from ecshare.store.format import (
    ITEM_BYTES,
    PROLOGUE_BYTES,
    Sealed,
    TensorSpec,
    invalid_reason,
    seal,
    unseal,
)
from ecshare.store.integrity import Integrity
from ecshare.store.keys import Key
from ecshare.store.objects import Buffer

ZSTD: Final = "zstd"
"""The value of the option."""
_LEVEL = 1  # of zstd: higher levels take longer, and do not make exponents smaller
# If the packed payload is larger than this share of the original, the object is stored as it is.
_MOST_PACKED_SHARE = 0.95
# Numbers per pass: intermediate results stay in the core's cache.
_STEP = 1 << 17
_FLOATS = ("BF16", "F16", "F32")


class _Of(Struct, forbid_unknown_fields=True):
    """The tensor that was packed."""

    dtype: str
    shape: tuple[int, ...]
    attributes: dict[str, Any]


class _Attributes(Struct, forbid_unknown_fields=True):
    """The attributes of a packed object."""

    packed: Literal["zstd"]
    of: _Of


class Packing:
    """Packs and unpacks objects. Any thread; each call allocates memory for one or two objects."""

    def __init__(self, path: str) -> None:
        """`path`: where the user asked for it, for the message.

        Raises:
            ConfigError: a package is missing; names it.
        """
        try:
            import zstandard  # noqa: PLC0415 — an extra of its own
        except ImportError:
            raise ConfigError(
                f"{path}: 'zstd' needs a package that is missing here: pip install zstandard "
                "(ecshare's extra [zstd])"
            ) from None
        self._zstd: Any = zstandard

    def pack(self, body: Buffer, key: Key, integrity: Integrity | None) -> Buffer:
        """Return the packed form of `body`, a sealed object.

        If packing gains too little, return `body` itself.
        """
        sealed = unseal(memoryview(body), key, verify=False)
        spec, payload = sealed.spec, sealed.payload
        if spec.dtype not in _FLOATS or not spec.num_bytes:
            return body
        width = ITEM_BYTES[spec.dtype]
        numbers = np.frombuffer(payload, f"<u{width}")
        num_rest = len(payload) - len(numbers)
        exponents = np.empty(len(numbers), np.uint8)
        packed = np.empty(PROLOGUE_BYTES + len(payload), np.uint8)
        rest = packed[PROLOGUE_BYTES : PROLOGUE_BYTES + num_rest].reshape(-1, width - 1)
        for part in _parts(len(numbers)):
            bits = numbers[part]
            octets = (bits << 1 | bits >> 8 * width - 1).view(np.uint8).reshape(-1, width)
            exponents[part] = octets[:, -1]
            rest[part] = octets[:, :-1]
        frame = self._zstd.ZstdCompressor(level=_LEVEL).compress(exponents)
        num_bytes = num_rest + len(frame)
        if num_bytes > _MOST_PACKED_SHARE * len(payload):
            return body
        smaller = packed[: PROLOGUE_BYTES + num_bytes]
        smaller[PROLOGUE_BYTES + num_rest :] = np.frombuffer(frame, np.uint8)
        of = {"dtype": spec.dtype, "shape": list(spec.shape), "attributes": spec.attributes}
        try:
            about = TensorSpec("U8", (num_bytes,), {"packed": ZSTD, "of": of})
            seal(smaller.data, about, key, integrity)
        except ValueError:  # the attributes of both tensors may be too long
            return body
        return smaller.data

    def unpack(
        self, sealed: Sealed, key: Key, limit_bytes: int, integrity: Integrity | None
    ) -> memoryview | None:
        """Return the sealed object that is packed in `sealed`, which was verified; None: it is not
        packed.

        Raises:
            ObjectCorrupt: it cannot be unpacked, or to more than `limit_bytes`.
        """
        if "packed" not in sealed.spec.attributes:
            return None
        spec = _spec_of(sealed, limit_bytes)
        width = ITEM_BYTES[spec.dtype]
        num_numbers = spec.num_bytes // width
        num_rest = spec.num_bytes - num_numbers
        octets = np.frombuffer(sealed.payload, np.uint8)
        if len(octets) < num_rest:
            raise ObjectCorrupt("corrupt object: it is packed, and too short for its shape")
        rest = octets[:num_rest].reshape(-1, width - 1)
        exponents = self._exponents(sealed.payload[num_rest:], num_numbers)
        body = np.empty(PROLOGUE_BYTES + spec.num_bytes, np.uint8)
        numbers = body[PROLOGUE_BYTES:].view(f"<u{width}")
        for part in _parts(num_numbers):
            whole = np.empty((len(exponents[part]), width), np.uint8)
            whole[:, -1] = exponents[part]
            whole[:, :-1] = rest[part]
            bits = whole.view(f"<u{width}").reshape(-1)
            numbers[part] = bits >> 1 | bits << 8 * width - 1
        try:
            seal(body.data, spec, key, integrity)
        except ValueError as exc:
            raise ObjectCorrupt(f"corrupt object: it is packed, and {exc}") from exc
        return body.data

    def _exponents(self, frame: memoryview, count: int) -> Any:  # noqa: ANN401 — numpy's array
        """Return the exponents that are compressed in `frame`, uint8 [count].

        Raises:
            ObjectCorrupt: the frame has other contents.
        """
        try:
            # The decompressor allocates as much memory as the frame declares.
            declared = self._zstd.frame_content_size(frame)
            if declared != count:
                raise ObjectCorrupt(f"corrupt object: {declared} exponents of {count} are packed")
            exponents = self._zstd.ZstdDecompressor().decompress(
                frame, max_output_size=count, allow_extra_data=False
            )
        except self._zstd.ZstdError as exc:
            raise ObjectCorrupt(f"corrupt object: it cannot be unpacked, {exc}") from exc
        return np.frombuffer(exponents, np.uint8)


def _spec_of(sealed: Sealed, limit_bytes: int) -> TensorSpec:
    """Return the spec of the tensor that was packed.

    Raises:
        ObjectCorrupt: the attributes are invalid, or the object is larger than `limit_bytes`.
    """
    try:
        of = msgspec.convert(sealed.spec.attributes, _Attributes).of
    except msgspec.ValidationError as exc:
        raise ObjectCorrupt(f"corrupt object: it is packed, and {exc}") from exc
    spec = TensorSpec(of.dtype, of.shape, of.attributes)
    problem = invalid_reason(spec)
    if not problem and of.dtype not in _FLOATS:
        problem = f"{of.dtype} is never packed"
    if not problem and PROLOGUE_BYTES + spec.num_bytes > limit_bytes:
        problem = f"{spec.num_bytes} bytes are more than are expected"
    if problem:
        raise ObjectCorrupt(f"corrupt object: it is packed, and {problem}")
    return spec


def _parts(count: int) -> list[slice]:
    return [slice(start, start + _STEP) for start in range(0, count, _STEP)]
