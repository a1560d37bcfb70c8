# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV buffers of the time before V1, over the object store.

`KVStoreBufferBase` is a dictionary of tensors. `KVLookupBufferBase` finds KV caches by the tokens
they belong to, and hands each to one taker only. The bases are declared here, with the names and
signatures that vLLM gave them, because vLLM 0.32 has them no more.

A fault of the store is a miss, or a tensor that is not stored, and is counted; it never raises.
Objects go straight to the store: what can be replaced or taken must not lie in a host cache.
"""

import logging
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, ClassVar

import torch
from torch import Tensor

from ecshare.store.config import parse
from ecshare.store.errors import ObjectCorrupt, ObjectMissing, StoreError
from ecshare.store.format import PROLOGUE_BYTES, TensorSpec, seal, unseal
from ecshare.store.integrity import open_integrity
from ecshare.store.keys import Kind, namespace_digest, object_key
from ecshare.store.objects import ObjectStore, probe, read
from ecshare.store.open import open_store
from ecshare.transfer.jobs import MAX_OBJECT_BYTES
from ecshare.transfer.staging import as_tensor, dtype_name
from kvshare.config import KVConfig
from kvshare.pre_v1.blocking import BlockingSession
from kvshare.pre_v1.index import Entry, matches, pack, unpack
from kvshare.pre_v1.take_once import TakeOnce

logger = logging.getLogger(__name__)

_TRIES = 8
_MOST_DAMAGED = 10_000  # that are remembered


class KVCacheBufferBase(ABC):
    """Something that keeps KV caches."""

    @abstractmethod
    def close(self) -> None:
        """Let go of all resources."""


class KVStoreBufferBase(KVCacheBufferBase):
    """Tensors under unique text keys: a key, value or hidden state tensor each."""

    @abstractmethod
    def put(self, key: str, value: Tensor | None) -> None:
        """Keep `value` under `key`; None deletes what is there."""

    @abstractmethod
    def get(self, key: str) -> Tensor | None:
        """Return the tensor under `key`, None if there is none."""


class KVLookupBufferBase(KVCacheBufferBase):
    """KV caches by tokens and a region of interest (`roi`): a mask of the tokens they cover."""

    @abstractmethod
    def insert(
        self, input_tokens: Tensor, roi: Tensor, key: Tensor, value: Tensor, hidden: Tensor
    ) -> None:
        """Keep the KV cache (`key`, `value`) and the last hidden states of these tokens."""

    @abstractmethod
    def drop_select(self, input_tokens: Tensor | None, roi: Tensor | None) -> list[Tensor | None]:
        """Take a KV cache that fits these tokens out of the buffer; two None: any one."""


class _Buffer:
    """What both buffers share: a store, a thread for it, and counters."""

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

        ConfigError names a wrong one.
        """
        config = parse(KVConfig, options, path)
        self.counters: Counter[str] = Counter()
        """Events since the start, by name: what a caller may publish. Any thread may read."""
        self._integrity = open_integrity(config.integrity_key, path)
        self._facts = {
            "buffer": self._kind,
            "name": name,
            "format": self._format,
            "epoch": config.epoch,
            "integrity": self._integrity.fingerprint if self._integrity else "",
        }
        self._namespace = namespace_digest(self._facts)
        self._store: ObjectStore = open_store(config, path)
        self._session = BlockingSession(self._store, config.call_timeout_s)
        self._device = torch.device(device)
        try:
            self._start(path)
        except BaseException:
            self._session.close()
            raise

    def _start(self, path: str) -> None:
        """Try the store. ConfigError names `path`.url."""
        self._session.start(probe(self._store, write=True), f"{path}.url")

    def close(self) -> None:
        """End the thread and the connections, once. Calls after it raise RuntimeError."""
        self._session.close()

    def _failed(self, event: str, exc: BaseException) -> None:
        self.counters[event] += 1
        logger.warning("KV buffer: %s: %s", event, exc)

    async def _sealed(self, key: str) -> Tensor:
        """Return the verified tensor under `key`, on the CPU, its own copy."""
        body = await read(self._store, key, MAX_OBJECT_BYTES)
        sealed = unseal(body, key, integrity=self._integrity)
        try:
            return as_tensor(sealed.payload, sealed.facts).clone()
        except (ValueError, RuntimeError) as exc:  # a dtype, or a shape
            raise ObjectCorrupt(f"corrupt object: torch has no such tensor: {exc}") from exc

    def _body(self, key: str, tensor: Tensor) -> memoryview:
        """Return `tensor` as an object. _TooLarge; ValueError: a dtype that no object can hold."""
        facts = TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape), {})
        _check_size(PROLOGUE_BYTES + facts.num_bytes)
        body = memoryview(bytearray(PROLOGUE_BYTES + facts.num_bytes))
        if facts.num_bytes:
            as_tensor(body[PROLOGUE_BYTES:], facts).copy_(tensor)
        seal(body, facts, key, self._integrity)
        return body


class KVStoreBuffer(_Buffer, KVStoreBufferBase):
    """Tensors under text keys, for all processes that give the same store and `name`.

    Threads: any, one call at a time each. Tensors come back on `device`, as copies of their own.
    """

    _kind = "store"

    def put(self, key: str, value: Tensor | None) -> None:
        """Keep a copy of `value` under `key` (any text); None deletes.

        A tensor that is there already is replaced; in between, a reader may find none. Of writers
        at the same moment one wins. Raises ValueError: a dtype that no object can hold.
        """
        object_name = object_key(Kind.KV, self._namespace, key)
        try:
            body = None if value is None else self._body(object_name, value)
            self._session.run(self._replace(object_name, body))
            self.counters["deleted" if value is None else "stored"] += 1
        except (StoreError, TimeoutError) as exc:
            self._failed("not deleted" if value is None else "not stored", exc)

    def get(self, key: str) -> Tensor | None:
        """Return the tensor under `key`; None: there is none, or it cannot be had."""
        try:
            tensor = self._session.run(self._sealed(object_key(Kind.KV, self._namespace, key)))
        except ObjectMissing:
            self.counters["missing"] += 1
            return None
        except (StoreError, TimeoutError) as exc:
            self._failed("corrupt" if isinstance(exc, ObjectCorrupt) else "unavailable", exc)
            return None
        self.counters["found"] += 1
        return tensor.to(self._device)

    async def _replace(self, key: str, body: memoryview | None) -> None:
        if body is None:
            await self._store.delete([key])
            return
        for _ in range(_TRIES):  # others may write it, too
            if await self._store.put(key, body):
                return
            await self._store.delete([key])


class KVLookupBuffer(_Buffer, KVLookupBufferBase):
    """KV caches by their tokens, each taken once, by one of all processes that share the buffer.

    What is compared are the tokens of interest, `input_tokens[roi]`, of an entry and a question.
    They match if one of them begins with all of the other. Of several matches the one with the most
    tokens in common is taken; of those, one with no token too many before others. A shorter match
    covers the beginning of the question only; the caller computes the rest.

    Exactly once: taking an entry means to make an object that says so; the store lets one process
    only make it. It must refuse to overwrite (folders with hard links, S3 itself and most of its
    servers do): ConfigError otherwise. That object stays for an hour, for an entry may come back
    when a put of it was sent twice; then each buffer that is open removes it, and what is left of
    the entry. A process that dies while it takes an entry, or whose store fails then, may take that
    entry with it; whoever dies before leaves it to others.
    """

    _kind = "lookup"
    _format = 2

    def _start(self, path: str) -> None:
        super()._start(path)
        markers = namespace_digest({**self._facts, "what": "taken"})
        self._taker = TakeOnce(self._store, self._namespace, markers)
        self._damaged: OrderedDict[str, None] = OrderedDict()
        self._session.start(self._taker.check(path), f"{path}.url")
        self._session.run_beside(self._taker.keep_swept())

    def insert(
        self, input_tokens: Tensor, roi: Tensor, key: Tensor, value: Tensor, hidden: Tensor
    ) -> None:
        """Keep copies of the tensors of these tokens, for one taker.

        `input_tokens`: [n], integers. `roi`: [n], True for each token that `key` and `value`, of
        any shape, are about; at least one. Raises ValueError: tokens or mask of another form.
        """
        tensors = {
            "input_tokens": input_tokens,
            "roi": roi,
            "key": key,
            "value": value,
            "hidden": hidden,
        }
        tokens = tokens_of_interest(input_tokens, roi)
        entry = Entry.new(self._namespace, tokens)
        try:
            _check_size(sum(tensor.nbytes for tensor in tensors.values()))
            body = self._body(entry.key, pack(tokens, tensors))
            self._session.run(self._store.put(entry.key, body))
            self.counters["inserted"] += 1
        except (StoreError, TimeoutError) as exc:
            self._failed("not inserted", exc)

    def drop_select(self, input_tokens: Tensor | None, roi: Tensor | None) -> list[Tensor | None]:
        """Take the best match out of the buffer; two None: any entry.

        Returns its [input_tokens, roi, key, value, hidden], or five None: nothing matches, or the
        store fails. Raises ValueError: tokens or mask of another form, or only one of them None.
        """
        if (input_tokens is None) != (roi is None):
            raise ValueError("input_tokens and roi: give both, or neither to take any entry")
        wanted = None
        if input_tokens is not None and roi is not None:
            wanted = tokens_of_interest(input_tokens, roi)
        try:
            tensors = self._session.run(self._take(wanted))
        except (StoreError, TimeoutError) as exc:
            self._failed("unavailable", exc)
            tensors = None
        if tensors is None:
            self.counters["missing"] += 1
            return [None] * 5
        self.counters["taken"] += 1
        return [tensor.to(self._device) for tensor in tensors]

    async def _take(self, wanted: tuple[int, ...] | None) -> list[Tensor] | None:
        async with aclosing(matches(self._store, self._namespace, wanted)) as entries:  # type: ignore[type-var]
            async for entry in entries:
                tensors = await self._offered(entry.key)
                if tensors and entry.covers(tensors, wanted) and await self._taker.take(entry.key):
                    return tensors
        return None

    async def _offered(self, key: str) -> list[Tensor] | None:
        """Return an entry's tensors. None: it is taken, or was found damaged.

        A damaged entry stays: it may be damaged on its way to this host alone. It is not read
        again here.
        """
        if key in self._damaged or await self._taker.is_taken(key):
            return None
        try:
            return await self._read(key)
        except ObjectMissing:
            return None
        except ObjectCorrupt as exc:
            self._failed("corrupt", exc)
            self._damaged[key] = None
            if len(self._damaged) > _MOST_DAMAGED:
                self._damaged.popitem(last=False)
            return None

    async def _read(self, key: str) -> list[Tensor]:
        """As `_sealed`, of an entry. ObjectCorrupt: twice; once may be damage on the way."""
        try:
            return unpack(await self._sealed(key))
        except ObjectCorrupt:
            return unpack(await self._sealed(key))


class _TooLarge(StoreError):
    """No reader would take such an object."""


def _check_size(num_bytes: int) -> None:
    """_TooLarge: an object of so many bytes."""
    if num_bytes > MAX_OBJECT_BYTES:
        raise _TooLarge(f"it has {num_bytes} bytes, an object at most {MAX_OBJECT_BYTES}")


def tokens_of_interest(input_tokens: Tensor, roi: Tensor) -> tuple[int, ...]:
    """Return `input_tokens[roi]`. ValueError names what has another form."""
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
