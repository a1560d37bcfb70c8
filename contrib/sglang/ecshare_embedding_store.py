# SPDX-License-Identifier: Apache-2.0
"""An `EmbeddingStore` of SGLang whose embeddings lie in a folder or a bucket, through ecshare.

SGLang makes it without arguments, so the environment variable ECSHARE_EMBEDDING_STORE has its
options as JSON: `model`, any text that changes with the weights and the processor, because SGLang's
hashes are of media alone; and those of ecshare's connectors for a store, of which `url` is
required.

A faulty store costs hits: no method raises because of it. No byte reaches SGLang's memory before
the object's checksum, key, type and size were verified.
"""

import asyncio
import json
import logging
import os
import threading
from collections.abc import Coroutine
from time import monotonic
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.embedding_store import EmbeddingStore

from ecshare.store.config import StoreConfig, parse
from ecshare.store.errors import ConfigError, ObjectCorrupt, ObjectUnreadable, StoreError
from ecshare.store.format import FORMAT_VERSION, PROLOGUE_BYTES, TensorSpec, seal, unseal
from ecshare.store.integrity import open_integrity
from ecshare.store.keys import Key, Kind, namespace_digest, object_key
from ecshare.store.manifest import write_manifest
from ecshare.store.objects import Memory
from ecshare.store.open import open_store
from ecshare.transfer.client.priority import Priority
from ecshare.transfer.client.store_client import StoreClient

logger = logging.getLogger(__name__)

T = TypeVar("T")

OPTIONS = "ECSHARE_EMBEDDING_STORE"
_AT_ONCE = 4  # objects in memory of our own: each has at most this part of `buffer_bytes`
_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


class ECShareEmbeddingStore(EmbeddingStore):
    """Stores embeddings as verified objects. Any thread may call it; close() ends its thread.

    Raises:
        ConfigError: an option is missing or wrong; names it.
    """

    def __init__(self, storage_config: dict[str, Any] | None = None) -> None:
        """`storage_config`: the options; by default, those in the environment."""
        options = dict(_from_environment() if storage_config is None else storage_config)
        model = options.pop("model", None)
        if not isinstance(model, str) or not model:
            raise ConfigError(f"{OPTIONS}.model: give a text that names model and weights")
        config = parse(StoreConfig, options, OPTIONS)
        self._integrity = open_integrity(config, OPTIONS)
        self._facts = {
            "format": FORMAT_VERSION,
            "engine": "sglang",
            "model": model,
            "epoch": config.epoch,
            "tenant": config.tenant,
            "integrity": self._integrity.name if self._integrity else "",
        }
        self._namespace = namespace_digest(self._facts)
        self._config = config
        self._most_bytes = config.buffer_bytes // _AT_ONCE
        self._dtype: torch.dtype | None = None
        self._regions: list[tuple[int, memoryview]] = []
        self._client = StoreClient(
            open_store(config, OPTIONS),
            config.io_timeout_s,
            min(config.wait_s, config.io_timeout_s),
        )
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._describe(), self._loop)

    def register_buffer(self, tensor: torch.Tensor) -> None:
        """Accept pointers into `tensor`; into memory that was not registered, they are refused.

        Raises:
            ValueError: it is not contiguous memory of the CPU, or has another dtype than the last.
        """
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError("an embedding pool is contiguous memory of the CPU")
        if tensor.dtype not in _DTYPES or self._dtype not in (None, tensor.dtype):
            raise ValueError(f"an embedding pool has one of {list(_DTYPES)}, and all have the same")
        self._dtype = tensor.dtype
        raw = memoryview(tensor.flatten().view(torch.uint8).numpy())
        self._regions.append((tensor.data_ptr(), raw))

    def batch_is_exist(self, hashes: list[str]) -> list[bool]:
        """Return for each hash whether `batch_get` would probably find it."""
        return self._each([self._exists(each) for each in hashes])

    def batch_get(self, hashes: list[str], ptrs: list[int], sizes: list[int]) -> list[bool]:
        """Load each embedding of exactly that size, and return which were loaded."""
        return self.batch_get_into_multi_buffers(
            hashes, [[each] for each in ptrs], [[each] for each in sizes]
        )

    def batch_put(self, hashes: list[str], ptrs: list[int], sizes: list[int]) -> list[bool]:
        """Store each embedding, unless it is stored; return which are stored now."""
        return self.batch_put_from_multi_buffers(
            hashes, [[each] for each in ptrs], [[each] for each in sizes]
        )

    def batch_get_into_multi_buffers(
        self, hashes: list[str], ptrs: list[list[int]], sizes: list[list[int]]
    ) -> list[bool]:
        """Load each embedding into its parts, one after the other; see `batch_get`."""
        return self._each([self._get(*each) for each in _triples(hashes, ptrs, sizes)])

    def batch_put_from_multi_buffers(
        self, hashes: list[str], ptrs: list[list[int]], sizes: list[list[int]]
    ) -> list[bool]:
        """Store each embedding from its parts, one after the other; see `batch_put`."""
        return self._each([self._put(*each) for each in _triples(hashes, ptrs, sizes)])

    def close(self) -> None:
        """End all calls and the thread, and close the store."""
        asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result(
            self._config.call_timeout_s
        )
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _each(self, calls: list[Coroutine[Any, Any, bool]]) -> list[bool]:
        """Run the calls in our thread. One that fails, or is late, is False."""

        async def run() -> list[bool]:
            done = await asyncio.gather(*map(self._guarded, calls))
            return list(done)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    async def _guarded(self, call: Coroutine[Any, Any, bool]) -> bool:
        try:
            async with asyncio.timeout(self._config.io_timeout_s):
                return await call
        except (StoreError, OSError, ValueError, TypeError) as exc:  # a TimeoutError is an OSError
            logger.debug("an embedding is not shared: %s", exc)
            return False

    async def _exists(self, mm_hash: str) -> bool:
        return await self._client.has(self._key(mm_hash))

    async def _get(self, mm_hash: str, ptrs: list[int], sizes: list[int]) -> bool:
        key, parts = self._key(mm_hash), self._parts(ptrs, sizes)
        if self._client.damaged.is_quarantined(key):
            return False
        spec = self._spec(parts)
        sink = Memory(PROLOGUE_BYTES + spec.num_bytes)
        async with self._slots:
            deadline_s = monotonic() + self._config.io_timeout_s
            try:
                await self._client.ask(
                    lambda store: store.get(key, sink),
                    Priority.LOAD,
                    PROLOGUE_BYTES + spec.num_bytes,
                    deadline_s,
                )
                sealed = unseal(sink.body, key, integrity=self._integrity)
                if sealed.spec != spec:
                    raise ObjectCorrupt(f"{key} is not the embedding that was asked for")  # noqa: TRY301
            except ObjectUnreadable:
                raise
            except ObjectCorrupt as exc:
                logger.warning("an embedding in the store is damaged: %s", exc)
                self._client.damaged.quarantine(key)
                self._client.damaged.replaceable[key] = None  # the next save replaces it
                raise
            start = 0
            for part in parts:
                part[:] = sealed.payload[start : start + len(part)]
                start += len(part)
        return True

    async def _put(self, mm_hash: str, ptrs: list[int], sizes: list[int]) -> bool:
        key, parts = self._key(mm_hash), self._parts(ptrs, sizes)
        async with self._slots:
            body = bytearray(PROLOGUE_BYTES) + b"".join(parts)
            seal(memoryview(body), self._spec(parts), key, self._integrity)
            await self._client.put_if_lost(key, body)
        return True

    def _key(self, mm_hash: str) -> Key:
        """Return the key of a hash of SGLang, which is hashed again: a client may have chosen it.

        Raises:
            TypeError, ValueError: it is not a text, or no pool was registered.
        """
        if not isinstance(mm_hash, str):
            raise TypeError(f"a hash is a text, got {type(mm_hash).__name__}")
        return object_key(Kind.EC, self._namespace, mm_hash, self._dtype_name().lower())

    def _parts(self, ptrs: list[int], sizes: list[int]) -> list[memoryview]:
        """Return the registered memory at these places.

        Raises:
            ValueError: it is not, or is too large.
        """
        if not 0 < sum(sizes) <= self._most_bytes:
            raise ValueError(f"an embedding has 1 to {self._most_bytes} bytes: buffer_bytes / 4")
        return [self._part(ptr, size) for ptr, size in zip(ptrs, sizes, strict=True)]

    def _part(self, ptr: int, size: int) -> memoryview:
        for start, region in self._regions:
            if ptr - start >= 0 and 0 < size <= len(region) - (ptr - start):
                return region[ptr - start :][:size]
        raise ValueError(f"{size} bytes at {ptr} are not in a registered pool")

    def _spec(self, parts: list[memoryview]) -> TensorSpec:
        num_bytes = sum(map(len, parts))
        item_bytes = torch.empty(0, dtype=self._dtype).element_size()
        if num_bytes % item_bytes:
            raise ValueError(f"{num_bytes} bytes are not whole numbers of {item_bytes} bytes")
        return TensorSpec(self._dtype_name(), (num_bytes // item_bytes,))

    def _dtype_name(self) -> str:
        if self._dtype is None:
            raise ValueError("no pool was registered")
        return _DTYPES[self._dtype]

    async def _describe(self) -> None:
        """Store what stands for our namespace, for `ecshare ls` and others."""
        try:
            await self._client.ask(
                lambda store: write_manifest(store, Kind.EC, self._namespace, self._facts),
                Priority.SAVE,
            )
        except StoreError as exc:
            logger.warning("the store takes no embeddings now: %s", exc)


def _triples(
    hashes: list[str], ptrs: list[list[int]], sizes: list[list[int]]
) -> list[tuple[str, list[int], list[int]]]:
    """Return what belongs together.

    Raises:
        ValueError: the lists have different lengths.
    """
    return list(zip(hashes, ptrs, sizes, strict=True))


def _from_environment() -> dict[str, Any]:
    text = os.environ.get(OPTIONS, "")
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ConfigError(f"{OPTIONS}: write a JSON object with the options model and url into it")
    return options
