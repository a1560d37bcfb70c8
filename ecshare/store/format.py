# SPDX-License-Identifier: Apache-2.0
"""The format of an object: one tensor, as a safetensors file with a 4,096-byte prologue.

    byte 0      8 bytes, little endian: 4088
    byte 8      the safetensors header, JSON, padded with blanks
    byte 4096   the payload: the tensor, row-major, little endian

Because the prologue has a fixed size, a device can copy to byte 4,096 of a slab before the checksum
is known. `seal` then writes the header in front, and the slab is sent as it is. docs/format.md is
normative. An attacker may have written any object, so sizes are bounded before they are used.
"""

import json
import math
import struct
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import xxhash
from msgspec import Struct

from ecshare import __version__
from ecshare.store.errors import ObjectCorrupt, ObjectForeign
from ecshare.store.integrity import Integrity
from ecshare.store.keys import FORMAT_VERSION, JSON

PROLOGUE_BYTES: Final = 4096
TENSOR_NAME: Final = "tensor"
MAX_DIMENSIONS: Final = 8

ITEM_BYTES: Final[dict[str, int]] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
"""Bytes per element of every dtype an object may have, by its safetensors name."""

_LENGTH = struct.Struct("<Q")
_HEADER_BYTES: Final = PROLOGUE_BYTES - _LENGTH.size
_CHECKSUM_PREFIX: Final = "xxh3_128:"


class TensorSpec(Struct, frozen=True):
    """Describes the payload."""

    dtype: str
    """A safetensors name: a key of ITEM_BYTES."""
    shape: tuple[int, ...]
    attributes: dict[str, JSON] = {}
    """Other data for readers, e.g. `{"num_embeds": 256}`. Small, because it is in the prologue."""

    @property
    def num_bytes(self) -> int:
        """Return the size of the payload.

        Raises:
            KeyError: the dtype is unknown.
        """
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Sealed(Struct, frozen=True):
    """A parsed object. Its payload is not copied."""

    spec: TensorSpec
    payload: memoryview
    """Read-only; it keeps the object's buffer alive."""


class _Metadata(Struct, forbid_unknown_fields=False, omit_defaults=True):
    format: str = msgspec.field(name="ecshare.format")
    key: str = msgspec.field(name="ecshare.key")
    checksum: str = msgspec.field(name="ecshare.checksum")
    attributes: str = msgspec.field(name="ecshare.attributes")
    producer: str = msgspec.field(name="ecshare.producer")
    mac: str = msgspec.field(name="ecshare.mac", default="")


class _Tensor(Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Header(Struct, forbid_unknown_fields=True):
    metadata: _Metadata = msgspec.field(name="__metadata__")
    tensor: _Tensor = msgspec.field(name=TENSOR_NAME)


_header_decoder = msgspec.json.Decoder(_Header)
_attributes_decoder = msgspec.json.Decoder(dict[str, Any])
_MALFORMED_JSON = (msgspec.DecodeError, UnicodeError, RecursionError)


class _Front(Struct, frozen=True):
    """The parsed prologue of an object."""

    prologue: bytes
    header: _Header
    spec: TensorSpec


@dataclass(slots=True)
class StreamingChecksum:
    """Computes the checksum of an object while its pieces arrive, as long as they are in order.

    Adding a piece while it is in the CPU's cache costs a fraction of reading it again later. For
    one thread, or several in turn.
    """

    _num_bytes: int = 0
    _digest: xxhash.xxh3_128 | None = None
    _front: _Front | None = None
    _is_in_order: bool = True

    def take(self, offset: int, piece: memoryview) -> None:
        """Add the bytes from `offset` on. Never raises: `unseal` reports malformed bytes."""
        if not self._is_in_order or offset != self._num_bytes:
            self._is_in_order = False
            return
        rest = piece
        if self._digest is None:
            try:
                header = _header(piece)
                spec = _spec(header)
                self._digest = xxhash.xxh3_128(_signed_fields(spec, header.metadata))
                self._front = _Front(bytes(piece[:PROLOGUE_BYTES]), header, spec)
            except ObjectCorrupt:
                self._is_in_order = False
                return
            rest = piece[PROLOGUE_BYTES:]
        self._digest.update(rest)
        self._num_bytes += len(piece)

    def front(self, body: memoryview) -> _Front | None:
        """Return the parsed prologue, if `body` begins with the same bytes; else None."""
        front = self._front
        return front if front is not None and body[:PROLOGUE_BYTES] == front.prologue else None

    def digest(self, num_bytes: int) -> str:
        """Return the checksum; "" if not all of `num_bytes` arrived in order."""
        if self._digest is None or not self._is_in_order or self._num_bytes != num_bytes:
            return ""
        return _CHECKSUM_PREFIX + self._digest.hexdigest()


def seal(slab: memoryview, spec: TensorSpec, key: str, integrity: Integrity | None = None) -> None:
    """Write the prologue of `slab` in place. The payload is already at byte 4,096.

    `key`: under which the object will be stored. `integrity`: adds a MAC.

    Raises:
        ValueError: the slab is not 4,096 bytes plus the payload that `spec` describes, or the
            attributes do not fit into the prologue, or have too many levels.
    """
    raw = slab.cast("B") if slab.format != "B" or slab.ndim != 1 else slab
    problem = invalid_reason(spec)
    if problem:
        raise ValueError(f"cannot seal: {problem}")
    if len(raw) != PROLOGUE_BYTES + spec.num_bytes:
        raise ValueError(
            f"cannot seal: the slab has {len(raw)} bytes, "
            f"its spec asks for {PROLOGUE_BYTES + spec.num_bytes}"
        )
    metadata = _Metadata(
        format=str(FORMAT_VERSION),
        key=str(key),
        checksum="",
        attributes=_json(spec.attributes),
        producer=__version__,
    )
    payload = raw[PROLOGUE_BYTES:]
    signed = _signed_fields(spec, metadata)
    metadata.checksum = _checksum(signed, payload)
    if integrity is not None:
        metadata.mac = integrity.mac(signed, payload)
    tensor = _Tensor(dtype=spec.dtype, shape=spec.shape, data_offsets=(0, spec.num_bytes))
    header = msgspec.json.encode(_Header(metadata=metadata, tensor=tensor))
    if len(header) > _HEADER_BYTES:
        raise ValueError(
            f"cannot seal: the attributes need {len(metadata.attributes)} bytes; "
            f"the prologue is {len(header) - _HEADER_BYTES} bytes too small for them"
        )
    raw[:PROLOGUE_BYTES] = _LENGTH.pack(_HEADER_BYTES) + header.ljust(_HEADER_BYTES)


def unseal(
    body: memoryview,
    key: str,
    *,
    verify: bool = True,
    integrity: Integrity | None = None,
    streamed: StreamingChecksum | None = None,
) -> Sealed:
    """Parse and verify the object under `key`. The payload is a view into `body`.

    With `integrity`, an object without the right MAC is refused. `verify=False` skips the checksum
    and the MAC, and only these: for bytes that were verified before, and that no other user can
    have changed since. `streamed` was fed these bytes: its results are not computed again.

    Raises:
        ObjectForeign: it is intact, but has no right MAC.
        ObjectCorrupt: it is malformed or damaged, or an intact object of another key.
    """
    raw = body.cast("B") if body.format != "B" or body.ndim != 1 else body
    front = streamed.front(raw) if streamed else None
    header = front.header if front else _header(raw)
    spec = front.spec if front else _spec(header)
    metadata = header.metadata
    _check_key(header, key)
    payload = raw[PROLOGUE_BYTES:].toreadonly()
    if not len(payload) == spec.num_bytes == header.tensor.data_offsets[1]:
        raise ObjectCorrupt(
            f"corrupt object: {len(payload)} bytes of payload, {spec.num_bytes} expected"
        )
    if header.tensor.data_offsets[0] != 0:
        raise ObjectCorrupt("corrupt object: the tensor does not begin at byte 0 of the payload")
    if verify:
        checksum = streamed.digest(len(raw)) if streamed and front else ""
        checksum = checksum or _checksum(_signed_fields(spec, metadata), payload)
        if checksum != metadata.checksum:
            raise ObjectCorrupt("corrupt object: the checksum differs")
        if integrity is not None:
            _authenticate(spec, metadata, payload, integrity)
    return Sealed(spec=spec, payload=payload)


def _authenticate(
    spec: TensorSpec, metadata: _Metadata, payload: memoryview, integrity: Integrity
) -> None:
    if not integrity.accepts(metadata.mac, _signed_fields(spec, metadata), payload):
        wrong = "the MAC is not made with our integrity_key" if metadata.mac else "it has no MAC"
        raise ObjectForeign(f"corrupt object: {wrong}")


def _check_key(header: _Header, key: str) -> None:
    """Check that the object is that of `key`: an intact object may be a copy of another one."""
    stored = header.metadata.key
    if stored != key:
        raise ObjectCorrupt(f"corrupt object: it was stored as {stored[:200]!r}, not as {key}")


def _header(raw: memoryview) -> _Header:
    if len(raw) < PROLOGUE_BYTES:
        raise ObjectCorrupt(f"corrupt object: {len(raw)} bytes are less than a prologue")
    if _LENGTH.unpack_from(raw)[0] != _HEADER_BYTES:
        raise ObjectCorrupt("corrupt object: it does not begin with an ecshare prologue")
    try:
        header = _header_decoder.decode(bytes(raw[_LENGTH.size : PROLOGUE_BYTES]))
    except _MALFORMED_JSON as exc:
        raise ObjectCorrupt(f"corrupt object: malformed header, {exc}") from exc
    if header.metadata.format != str(FORMAT_VERSION):
        raise ObjectCorrupt(
            f"corrupt object: format {header.metadata.format[:16]!r}, this reader knows "
            f"{FORMAT_VERSION}"
        )
    return header


def _spec(header: _Header) -> TensorSpec:
    spec = TensorSpec(
        dtype=header.tensor.dtype,
        shape=header.tensor.shape,
        attributes=_attributes(header.metadata.attributes),
    )
    problem = invalid_reason(spec)
    if problem:
        raise ObjectCorrupt(f"corrupt object: {problem}")
    return spec


def _attributes(text: str) -> dict[str, JSON]:
    try:
        return _attributes_decoder.decode(text)
    except _MALFORMED_JSON as exc:
        raise ObjectCorrupt(f"corrupt object: malformed attributes, {exc}") from exc


def invalid_reason(spec: TensorSpec) -> str | None:
    """Return why no object may have this spec; None if one may."""
    if spec.dtype not in ITEM_BYTES:
        return f"unknown dtype {spec.dtype[:32]!r}"
    if len(spec.shape) > MAX_DIMENSIONS or any(not 0 <= n < 1 << 48 for n in spec.shape):
        return "a shape has at most 8 dimensions, each of 0 to 2^48 - 1"
    return None


def _signed_fields(spec: TensorSpec, metadata: _Metadata) -> bytes:
    """Return the fields that the checksum and the MAC cover, besides the payload."""
    text = _json(
        [
            FORMAT_VERSION,
            metadata.key,
            spec.dtype,
            list(spec.shape),
            metadata.attributes,
            metadata.producer,
        ]
    )
    return text.encode("ascii")


def _json(value: JSON) -> str:
    """Return the only JSON text of `value`: sorted keys, no blanks, ASCII.

    Raises:
        ValueError: it has NaN, infinity, or more levels than Python can write, though msgspec can
            read them.
    """
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise ValueError("its attributes have too many levels") from None


def _checksum(signed: bytes, payload: memoryview) -> str:
    digest = xxhash.xxh3_128(signed)
    digest.update(payload)
    return _CHECKSUM_PREFIX + digest.hexdigest()
