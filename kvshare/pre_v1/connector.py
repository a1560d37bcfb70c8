# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV connector from before V1, based on the look-up buffer.

A prefill process sends the KV and the hidden states that it computed for each prompt of a batch. A
decode process receives them before its model runs. If it receives all of a batch, it need not run
the model at all.

The base class is declared here with vLLM's name and signatures, because vLLM 0.32 no longer has it.
`kvshare.pre_v1.model_input` documents what is read of `model_input`.
"""

import logging
from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.sequence import IntermediateTensors

from ecshare.store.errors import ObjectCorrupt
from kvshare.chunks.facts import kv_namespace
from kvshare.config import OPTIONS_PATH
from kvshare.pre_v1.buffers import KVLookupBuffer
from kvshare.pre_v1.index import from_file, pack
from kvshare.pre_v1.model_input import Batch, Prompt

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

States = Tensor | IntermediateTensors


class KVConnectorBase(ABC):
    """Moves KV caches and hidden states between engines, before and after the model runs."""

    @abstractmethod
    def __init__(self, rank: int, local_rank: int, config: "VllmConfig") -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Release all resources."""

    @abstractmethod
    def send_kv_caches_and_hidden_states(
        self,
        model_executable: torch.nn.Module,
        model_input: Any,
        kv_caches: list[Tensor],
        hidden_or_intermediate_states: States,
    ) -> None:
        """Send what the model has computed. Called after it ran."""

    @abstractmethod
    def recv_kv_caches_and_hidden_states(
        self, model_executable: torch.nn.Module, model_input: Any, kv_caches: list[Tensor]
    ) -> tuple[States | None, bool, Any]:
        """Fill the caches before the model runs; return states, whether to bypass it, its input."""


class KVShareLegacyConnector(KVConnectorBase):
    """Sends and receives through the store of `kv_connector_extra_config`.

    Each rank stores one object for each prompt, with its own share of heads and layers. KV caches
    are one tensor for each layer, [2, blocks, block size, heads, head size]. Each sent prompt is
    received once.

    Threads: the model runner's. Store faults raise nothing: what cannot be sent is not stored, and
    what cannot be received is computed. `counters` count both.
    """

    def __init__(self, rank: int, local_rank: int, config: "VllmConfig") -> None:
        """Open the store. `rank` counts all processes of this engine; `local_rank` is not used.

        Raises:
            ConfigError: an option is wrong; names it.
            ValueError: there is no `kv_transfer_config`.
        """
        del local_rank
        role = config.kv_transfer_config
        if role is None:
            raise ValueError("kv_transfer_config: missing; give the connector its role and options")
        options: dict[str, Any] = role.kv_connector_extra_config
        parallel = config.parallel_config
        size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        namespace = kv_namespace(config, str(options.get("epoch", "")))
        self._sends: bool = role.is_kv_producer
        self._receives: bool = role.is_kv_consumer
        self._buffer = KVLookupBuffer(
            options, name=f"legacy:{namespace.digest}:{rank}of{size}", path=OPTIONS_PATH
        )

    @property
    def counters(self) -> Counter[str]:
        """Counts of prompts by outcome, and the events of the look-up buffer."""
        return self._buffer.counters

    def close(self) -> None:
        """Close the connections to the store."""
        self._buffer.close()

    def send_kv_caches_and_hidden_states(
        self,
        model_executable: torch.nn.Module,
        model_input: Any,
        kv_caches: list[Tensor],
        hidden_or_intermediate_states: States,
    ) -> None:
        """Store KV and states of each whole prompt in the batch; decoding sequences are skipped.

        Blocks until they are stored. `hidden_or_intermediate_states`: [n, ...], or a set of such
        tensors, for the n tokens of the batch. `kv_caches`: the layers of this rank.
        `model_executable` is not used.
        """
        del model_executable
        if not self._sends:
            return
        batch = Batch(model_input)
        for prompt in batch.prompts:
            if not prompt.is_whole:
                self.counters["prompts/partial"] += 1  # its tokens do not identify it
                continue
            tokens = batch.tokens[prompt.start : prompt.end]
            slots = batch.slots[prompt.start : prompt.end]
            keys, values = _read_slots(kv_caches, slots)
            states = _packed_states(hidden_or_intermediate_states, prompt)
            roi = torch.ones_like(tokens, dtype=torch.bool)
            self._buffer.insert(tokens, roi, keys, values, states)
            self.counters["prompts/sent"] += 1

    def recv_kv_caches_and_hidden_states(
        self, model_executable: torch.nn.Module, model_input: Any, kv_caches: list[Tensor]
    ) -> tuple[States | None, bool, Any]:
        """Fill the caches with what is stored of the batch's prompts.

        Returns (states, True, model_input) if the whole batch was received: the states of all its
        tokens, as sent. Otherwise returns (None, False, adjusted): run the model on `adjusted`,
        which omits the tokens whose KV is now in the caches; at least one of each sequence remains.
        It omits nothing if the states of such tokens are needed.
        """
        del model_executable
        batch = Batch(model_input)
        if not self._receives or not batch.prompts:
            return None, False, model_input
        received = [self._receive(batch, prompt, kv_caches) for prompt in batch.prompts]
        counts, states = [count for count, _ in received], [state for _, state in received]
        if not _can_be_joined(states):
            counts = batch.leaving_one_token(counts)  # the same on all ranks
        counts = _minimum_over_ranks(counts)
        if batch.is_prefill_only and counts == [prompt.num_tokens for prompt in batch.prompts]:
            return _joined(states), True, model_input
        computed = batch.leaving_one_token(counts)
        if not any(computed):
            return None, False, model_input
        return None, False, batch.without_computed(computed, kv_caches[0].shape[2])

    def _receive(
        self, batch: Batch, prompt: Prompt, kv_caches: list[Tensor]
    ) -> tuple[int, States | None]:
        """Receive one prompt; return the number of its first tokens received, and their states."""
        if not prompt.is_whole:
            return 0, None
        tokens = batch.tokens[prompt.start : prompt.end]
        roi = torch.ones_like(tokens, dtype=torch.bool)
        _, found_roi, keys, values, packed = self._buffer.drop_select(tokens, roi)
        if found_roi is None or keys is None or values is None or packed is None:
            self.counters["prompts/missing"] += 1
            return 0, None
        count = min(len(found_roi), prompt.num_tokens)
        states = unpacked_states(packed, count, batch.tokens.device)
        slots = batch.slots[prompt.start : prompt.start + count]
        fits = states is not None and bool(found_roi.bool().all())
        if not fits or not write_slots(kv_caches, slots, keys, values):
            self.counters["prompts/unfit"] += 1
            return 0, None
        self.counters["prompts/received"] += 1
        return count, states


def _read_slots(kv_caches: list[Tensor], slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and the values in `slots`: [layers, tokens, heads, head size] each."""
    block_size = kv_caches[0].shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    pages = torch.stack([cache[:, blocks, offsets] for cache in kv_caches])
    return pages[:, 0], pages[:, 1]


def write_slots(kv_caches: list[Tensor], slots: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Write keys and values, [layer, token, head, content], to `slots`. False: no fit."""
    like, count = kv_caches[0], len(slots)
    form = (len(kv_caches), like.shape[3], like.shape[4])
    for tensor in (keys, values):
        fits = tensor.ndim == 4 and (tensor.shape[0], *tensor.shape[2:]) == form
        if not fits or tensor.shape[1] < count or tensor.dtype != like.dtype:
            return False
    blocks, offsets = slots // like.shape[2], slots % like.shape[2]
    for layer, cache in enumerate(kv_caches):
        pages = torch.stack((keys[layer, :count], values[layer, :count])).to(cache.device)
        cache[:, blocks, offsets] = pages
    return True


def _packed_states(states: States, prompt: Prompt) -> Tensor:
    """Return the states of one prompt as one tensor; several tensors are packed into bytes."""
    part = slice(prompt.start, prompt.end)
    if isinstance(states, Tensor):
        return states[part]
    named = {name: each[part] for name, each in states.tensors.items()}
    return pack(named)


def unpacked_states(packed: Tensor, count: int, device: torch.device) -> States | None:
    """Return the states of the first `count` tokens from `_packed_states`. None: too few."""
    if packed.dtype != torch.uint8:
        return packed[:count].to(device) if packed.ndim and len(packed) >= count else None
    try:
        named = from_file(packed)
    except ObjectCorrupt:
        return None
    if not named or any(not each.ndim or len(each) < count for each in named.values()):
        return None
    return IntermediateTensors({name: each[:count].to(device) for name, each in named.items()})


def _can_be_joined(states: list[States | None]) -> bool:
    """Return whether no states are missing and all have one form."""
    forms = [_form(each) for each in states]
    return forms[0] is not None and all(form == forms[0] for form in forms)


def _form(states: States | None) -> object:
    """Return a value that is equal for the states of two prompts if they come from one model."""
    if states is None or isinstance(states, Tensor):
        return None if states is None else (states.dtype, states.shape[1:])
    return {name: _form(each) for name, each in states.tensors.items()}


def _joined(states: list[States | None]) -> States:
    """Return the states of the whole batch."""
    if isinstance(states[0], Tensor):
        return torch.cat([each for each in states if isinstance(each, Tensor)])
    several = [each for each in states if isinstance(each, IntermediateTensors)]
    names = several[0].tensors
    return IntermediateTensors(
        {name: torch.cat([each.tensors[name] for each in several]) for name in names}
    )


def _minimum_over_ranks(counts: list[int]) -> list[int]:
    """Return the minima over all ranks, which must run the model on the same tokens."""
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():  # type: ignore[no-untyped-call]
        return counts
    shared = torch.tensor(counts)
    for group in (parallel_state.get_tp_group(), parallel_state.get_pp_group()):
        if group.world_size > 1:
            torch.distributed.all_reduce(
                shared, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group
            )
    return [int(count) for count in shared]
