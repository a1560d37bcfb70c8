# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV buffers from before V1, over the object store.

`KVStoreBufferBase` is a dictionary of tensors. `KVLookupBufferBase` finds KV caches by their
tokens, and hands each one to a single taker. The base classes are declared here with vLLM's names
and signatures, because vLLM 0.32 no longer has them.

A store fault is counted and never raised: a read is a miss, and a write is skipped. Objects bypass
the host cache, because they can be replaced or taken.
"""

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, ClassVar

import torch
from torch import Tensor

from ecshare.store.config import parse
from ecshare.store.errors import ObjectCorrupt, ObjectMissing, StoreError
from ecshare.store.format import PROLOGUE_BYTES, TensorSpec, seal, unseal
from ecshare.store.integrity import open_integrity
from ecshare.store.keys import Key, Kind, namespace_digest, object_key
from ecshare.store.objects import ObjectStore, probe, read
from ecshare.store.open import open_store
from ecshare.transfer.device.staging import as_tensor, dtype_name
from ecshare.transfer.jobs import MAX_OBJECT_BYTES
from kvshare.config import KVConfig
from kvshare.pre_v1.blocking import BlockingClient
from kvshare.pre_v1.index import EntryName, matches, pack, unpack
from kvshare.pre_v1.take_once import TakeOnce

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 8


class KVCacheBufferBase(ABC):
    """A buffer of KV caches."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources."""


class KVStoreBufferBase(KVCacheBufferBase):
    """Tensors under unique text keys: each is a key, value or hidden state tensor."""

    @abstractmethod
    def put(self, key: str, value: Tensor | None) -> None:
        """Store `value` under `key`. None deletes the tensor."""

    @abstractmethod
    def get(self, key: str) -> Tensor | None:
        """Return the tensor under `key`, None if there is none."""


class KVLookupBufferBase(KVCacheBufferBase):
    """KV caches by tokens and a region of interest (`roi`): a mask of the tokens they cover."""

    @abstractmethod
    def insert(
        self, input_tokens: Tensor, roi: Tensor, key: Tensor, value: Tensor, hidden: Tensor
    ) -> None:
        """Store the KV cache (`key`, `value`) and the last hidden states of these tokens."""

    @abstractmethod
    def drop_select(self, input_tokens: Tensor | None, roi: Tensor | None) -> list[Tensor | None]:
        """Remove and return a KV cache that matches these tokens; with two None, any one."""


class _Buffer:
    """The common part of both buffers: a store, a blocking client and counters."""

    _kind: ClassVar[str]
    _format: ClassVar[int] = 1

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        name: str = "default",
        device: torch.device | str = "cpu",
        path: str = "options",
    ) -> None:
        """`options`: as in `kv_connector_extra_config`; `path`: where the user wrote them.

        Raises:
            ConfigError: an option is wrong, or the store cannot be used; names the option.
        """
        config = parse(KVConfig, options, path)
        self.counters: Counter[str] = Counter()
        """Event counts since the start, by name. Any thread may read them."""
        self._integrity = open_integrity(config, path)
        self._facts: dict[str, Any] = {
            "buffer": self._kind,
            "name": name,
            "format": self._format,
            "epoch": config.epoch,
            "integrity": self._integrity.name if self._integrity else "",
        }
        if config.tenant:
            self._facts["tenant"] = config.tenant
        self._namespace = namespace_digest(self._facts)
        self._store: ObjectStore = open_store(config, path)
        self._client = BlockingClient(self._store, config.call_timeout_s)
        self._device = torch.device(device)
        try:
            self._start(path)
        except BaseException:
            self._client.close()
            raise

    def _start(self, path: str) -> None:
        """Check that the store can be read and written.

        Raises:
            ConfigError: the store cannot be used; names `path`.url.
        """
        self._client.start(probe(self._store, write=True), f"{path}.url")

    def close(self) -> None:
        """Close the connections and end the thread. Later calls raise RuntimeError."""
        self._client.close()

    def _count_failure(self, event: str, exc: BaseException) -> None:
        self.counters[event] += 1
        logger.warning("KV buffer: %s: %s", event, exc)

    async def _read_tensor(self, key: Key) -> Tensor:
        """Return the verified tensor under `key`, on the CPU, as a copy of its own.

        Raises:
            StoreError: it is missing or damaged, or the store failed.
        """
        body = await read(self._store, key, MAX_OBJECT_BYTES)
        sealed = unseal(body, key, integrity=self._integrity)
        try:
            return as_tensor(sealed.payload, sealed.spec).clone()
        except (ValueError, RuntimeError) as exc:  # an unknown dtype or an impossible shape
            raise ObjectCorrupt(f"corrupt object: torch has no such tensor: {exc}") from exc

    def _object_of(self, key: str, tensor: Tensor) -> memoryview:
        """Return `tensor` as an object.

        Raises:
            _TooLarge: it exceeds the size of an object.
            ValueError: its dtype cannot be stored.
        """
        spec = TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape), {})
        _check_size(PROLOGUE_BYTES + spec.num_bytes)
        body = memoryview(bytearray(PROLOGUE_BYTES + spec.num_bytes))
        if spec.num_bytes:
            as_tensor(body[PROLOGUE_BYTES:], spec).copy_(tensor)
        seal(body, spec, key, self._integrity)
        return body


class KVStoreBuffer(_Buffer, KVStoreBufferBase):
    """Tensors under text keys, for all processes with the same store and `name`.

    Any thread may call, each one call at a time. Tensors are returned on `device`, as copies of
    their own.
    """

    _kind = "store"

    def put(self, key: str, value: Tensor | None) -> None:
        """Store a copy of `value` under `key`, which may be any text. None deletes.

        An existing tensor is replaced; in between, a reader may find none. Of concurrent writers
        one wins.

        Raises:
            ValueError: the dtype cannot be stored.
        """
        object_name = object_key(Kind.KV, self._namespace, key)
        try:
            body = None if value is None else self._object_of(object_name, value)
            self._client.run(self._replace(object_name, body))
            self.counters["deleted" if value is None else "stored"] += 1
        except (StoreError, TimeoutError) as exc:
            self._count_failure("not deleted" if value is None else "not stored", exc)

    def get(self, key: str) -> Tensor | None:
        """Return the tensor under `key`. None: there is none, or the store failed."""
        try:
            tensor = self._client.run(self._read_tensor(object_key(Kind.KV, self._namespace, key)))
        except ObjectMissing:
            self.counters["missing"] += 1
            return None
        except (StoreError, TimeoutError) as exc:
            self._count_failure("corrupt" if isinstance(exc, ObjectCorrupt) else "unavailable", exc)
            return None
        self.counters["found"] += 1
        return tensor.to(self._device)

    async def _replace(self, key: Key, body: memoryview | None) -> None:
        if body is None:
            await self._store.delete([key])
            return
        for _ in range(_MAX_ATTEMPTS):  # other writers may interfere
            if await self._store.put(key, body):
                return
            await self._store.delete([key])


class KVLookupBuffer(_Buffer, KVLookupBufferBase):
    """KV caches by their tokens, each taken once, by one of all processes that share the buffer.

    An entry and a query are compared by their tokens of interest, `input_tokens[roi]`. They match
    if one is a prefix of the other. Of several matches the one with the most tokens in common is
    taken, and of those preferably one without further tokens. A shorter match covers only the
    beginning of the query; the caller computes the rest.

    Exactly once: a process takes an entry by creating a marker object, which the store lets only
    one process do. So the store must refuse to overwrite, as folders with hard links, S3 and most
    S3 servers do; otherwise the constructor raises ConfigError. The marker stays, because an entry
    may reappear if a put of it was sent twice: rules of expiry remove both, which must leave
    markers for an hour. If a process dies while it takes an entry, or its store fails then,
    that entry may be lost. If it dies earlier, the entry stays for others.
    """

    _kind = "lookup"
    _format = 3

    def _start(self, path: str) -> None:
        super()._start(path)
        markers = namespace_digest({**self._facts, "what": "taken"})
        self._take_once = TakeOnce(self._store, self._namespace, markers)
        self._client.start(self._take_once.check(path), f"{path}.url")

    def insert(
        self, input_tokens: Tensor, roi: Tensor, key: Tensor, value: Tensor, hidden: Tensor
    ) -> None:
        """Store copies of the tensors of these tokens, for one taker.

        `input_tokens`: [n], integers. `roi`: [n], True for each token that `key` and `value` cover,
        at least one. `key`, `value` and `hidden` may have any shape.

        Raises:
            ValueError: tokens or mask have another form.
        """
        tensors = {
            "input_tokens": input_tokens,
            "roi": roi,
            "key": key,
            "value": value,
            "hidden": hidden,
        }
        tokens = tokens_of_interest(input_tokens, roi)
        entry = EntryName.new(self._namespace, tokens)
        try:
            _check_size(sum(tensor.nbytes for tensor in tensors.values()))
            body = self._object_of(entry.key, pack(tensors))
            self._client.run(self._store.put(entry.key, body))
            self.counters["inserted"] += 1
        except (StoreError, TimeoutError) as exc:
            self._count_failure("not inserted", exc)

    def drop_select(self, input_tokens: Tensor | None, roi: Tensor | None) -> list[Tensor | None]:
        """Remove the best match from the buffer and return it; with two None, any entry.

        Returns [input_tokens, roi, key, value, hidden] of the entry, or five None if nothing
        matches or the store fails.

        Raises:
            ValueError: tokens or mask have another form, or only one of them is None.
        """
        if (input_tokens is None) != (roi is None):
            raise ValueError("input_tokens and roi: give both, or neither to take any entry")
        wanted = None
        if input_tokens is not None and roi is not None:
            wanted = tokens_of_interest(input_tokens, roi)
        try:
            tensors = self._client.run(self._take(wanted))
        except (StoreError, TimeoutError) as exc:
            self._count_failure("unavailable", exc)
            tensors = None
        if tensors is None:
            self.counters["missing"] += 1
            return [None] * 5
        self.counters["taken"] += 1
        return [tensor.to(self._device) for tensor in tensors]

    async def _take(self, wanted: tuple[int, ...] | None) -> list[Tensor] | None:
        async with aclosing(matches(self._store, self._namespace, wanted)) as entries:  # type: ignore[type-var]
            async for entry in entries:
                tensors = await self._read(entry.key)
                if (
                    tensors
                    and entry.covers(tensors, wanted)
                    and await self._take_once.take(entry.key)
                ):
                    return tensors
        return None

    async def _read(self, key: Key) -> list[Tensor] | None:
        """Return an entry's tensors. None: it is gone, or was found damaged.

        A damaged entry stays in the store, because the damage may concern only this host's reads.
        """
        try:
            return unpack(await self._read_tensor(key))
        except ObjectMissing:
            return None
        except ObjectCorrupt as exc:
            self._count_failure("corrupt", exc)
            return None


class _TooLarge(StoreError):
    """The object would be larger than readers accept."""


def _check_size(num_bytes: int) -> None:
    """Check the size of an object.

    Raises:
        _TooLarge: it is larger than readers accept.
    """
    if num_bytes > MAX_OBJECT_BYTES:
        raise _TooLarge(f"it has {num_bytes} bytes, an object at most {MAX_OBJECT_BYTES}")


def tokens_of_interest(input_tokens: Tensor, roi: Tensor) -> tuple[int, ...]:
    """Return `input_tokens[roi]`.

    Raises:
        ValueError: an argument has another form, or no token is of interest.
    """
    if input_tokens.ndim != 1 or input_tokens.is_floating_point():
        raise ValueError(
            f"input_tokens: expected integers in one dimension, got {_form(input_tokens)}"
        )
    if roi.shape != input_tokens.shape or roi.is_floating_point():
        raise ValueError(f"roi: expected a mask of {len(input_tokens)} tokens, got {_form(roi)}")
    tokens = tuple(input_tokens[roi.bool()].tolist())
    if not tokens:
        raise ValueError("roi: no token is of interest; at least one must be")
    return tokens


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
