# SPDX-License-Identifier: Apache-2.0
"""A whole engine with a toy model: the simulator of vLLM's loop, both halves of the connector, real
cache tensors and a real store.

The model is replaced by arithmetic. The KV of a token is a number made of all tokens up to it. The
state of a recurrent layer is a digest of all tokens so far, made of the digest before and a token.
The next token is made of the KV and the states that lie in the request's blocks. So a block that is
missing, stale, misplaced or foreign gives other tokens, as in a real model.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import Request

from ecshare.transfer.stats import merged
from kvshare.chunks.layers import AttentionWindow
from kvshare.chunks.prefix import Chunk, Grid, Prefix
from kvshare.connector import KVShareConnector
from lab.vllm_loop import EngineLoop, Model, Row, RunnerName
from tests.sibling import Load, Sibling

BLOCK = 4
LAYERS = 3
HEADS = 2
HEAD_SIZE = 8
VOCAB = 1000
GIVE_UP_S = 30.0
WEIGHTS = "adapter_model.bin"
WRONG = VOCAB
"""A token that no prompt holds."""


def write_model(folder: Path) -> Path:
    """Write the configuration of a small text model; there are no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HEADS * HEAD_SIZE,
        "intermediate_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def spec() -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32
    )


def window(num_tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=BLOCK,
        num_kv_heads=HEADS,
        head_size=HEAD_SIZE,
        dtype=torch.float32,
        sliding_window=num_tokens,
    )


def recurrent() -> MambaSpec:
    """A layer has two states, which together have the size of a digest. Pages are padded to those
    of an attention layer."""
    return MambaSpec(
        block_size=BLOCK,
        shapes=((2, 4), (4,)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=spec().page_size_bytes,
        mamba_cache_mode="align",
    )


def hybrid(num_recurrent: int = 1) -> tuple[KVCacheSpec, ...]:
    """Return the specs of a model that begins with recurrent layers, as most hybrids do."""
    return (*(recurrent() for _ in range(num_recurrent)), spec())


def cache_config(num_blocks: int, specs: Sequence[KVCacheSpec] = ()) -> KVCacheConfig:
    """Make cache groups of `LAYERS` layers each, which alternate in the model and share memory."""
    specs = specs or (spec(),)
    names = [
        [f"model.layers.{layer * len(specs) + group}.{_kind(each)}" for layer in range(LAYERS)]
        for group, each in enumerate(specs)
    ]
    page = specs[0].page_size_bytes
    tensors = [
        KVCacheTensor(
            size=page * num_blocks * LAYERS,
            layers=layers,
            layer_stride=page * num_blocks,
            block_stride=page,
        )
        for layers in names
    ]
    groups = [KVCacheGroupSpec(*group) for group in zip(names, specs, strict=True)]
    return KVCacheConfig(num_blocks, tensors, groups)


def _kind(spec: KVCacheSpec) -> str:
    return "linear_attn" if isinstance(spec, MambaSpec) else "self_attn.attn"


def vllm_config(
    model: Path,
    options: dict[str, Any],
    kv_role: str = "kv_both",
    sibling: dict[str, Any] | None = None,
    **engine_args: Any,
) -> VllmConfig:
    """`sibling`: the options of a `ToySibling` before ours, both below vLLM's MultiConnector, or
    behind ours if they say `is_behind`."""
    ours = {
        "kv_connector": "KVShareConnector",
        "kv_connector_module_path": "kvshare.connector",
        "kv_role": kv_role,
        "kv_connector_extra_config": options,
    }
    transfer = KVTransferConfig(**(ours if sibling is None else both_below(ours, sibling)))
    return engine_config(model, transfer, **engine_args)


def engine_config(
    model: Path, transfer: KVTransferConfig | None = None, **engine_args: Any
) -> VllmConfig:
    """Make the configuration of an engine with the connector of `transfer`, or without one."""
    args = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        kv_transfer_config=transfer,
        **engine_args,
    )
    config = args.create_engine_config()
    config.cache_config.block_size = BLOCK
    return config


def both_below(ours: dict[str, Any], sibling: dict[str, Any]) -> dict[str, Any]:
    theirs = {
        "kv_connector": "ToySibling",
        "kv_connector_module_path": "tests.kvshare.toy",
        "kv_role": "kv_both",
        "kv_connector_extra_config": sibling,
    }
    children = [ours, theirs] if sibling.get("is_behind") else [theirs, ours]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }


def options(folder: Path, **more: Any) -> dict[str, Any]:
    """Return the options of a store in `folder`, one object a block unless `more` says otherwise.

    Every hit is loaded: the toy model computes faster than any store.
    """
    ours = {"url": f"file://{folder}/store", "host_cache_dir": f"{folder}/host"}
    return ours | {"chunk_tokens": BLOCK, "load": "always"} | more


TOLD: dict[str, Any] = {"kvshare": {}}
"""Transfer params of a client that asks how many tokens are stored."""
FOR_DECODE: dict[str, Any] = {"kvshare": {"for_decode": True}}
"""Transfer params of a router that has P compute a prompt for D."""


def make_request(name: str, tokens: Sequence[int], max_tokens: int = 1, **more: Any) -> Request:
    """Make a request. It asks how many tokens are stored unless `kv_transfer_params` are given."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    params.extra_args = {"kv_transfer_params": more.pop("kv_transfer_params", TOLD)}
    return Request(
        request_id=name,
        prompt_token_ids=list(tokens),
        sampling_params=params,
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
        **more,
    )


def chunks_for(request: Request, chunk_blocks: int = 1) -> tuple[Chunk, ...]:
    """Return all chunks of a prompt: whole ones, and the tail or the partial one."""
    grid = Grid(BLOCK, chunk_blocks)
    prefix = Prefix.of(request, grid)
    chunks = [prefix.whole(number) for number in range(prefix.num_whole)]
    if prefix.tail:
        return (*chunks, prefix.tail.chunk(grid, sha256))
    return (*chunks, *prefix.partials(prefix.num_whole)[:1])


def kv_of(tokens: Sequence[int], group: int = 0) -> float:
    """Return the KV of the last of `tokens`: exact in float32, unique to its prefix and group."""
    digest = hashlib.sha256(repr(list(tokens)).encode()).digest()
    return float(int.from_bytes(digest[:2], "little") + 1 + 100_000 * group)


def state_of(tokens: Sequence[int], group: int, layer: int) -> bytes:
    """Return the state of a recurrent layer after `tokens`, unique to them, group and layer."""
    state = hashlib.sha256(f"{group} {layer}".encode()).digest()
    for token in tokens:
        state = next_state(state, token)
    return state


def next_state(state: bytes, token: int) -> bytes:
    return hashlib.sha256(state + token.to_bytes(4, "little")).digest()


def write_state(cache: Tensor, block: int, state: bytes) -> None:
    """Write the state of a recurrent layer. `cache`: all blocks of the layer."""
    cache[block].copy_(torch.frombuffer(bytearray(state), dtype=torch.int8).view_as(cache[block]))


def read_state(cache: Tensor, block: int) -> bytes:
    """Return the state of a recurrent layer. `cache`: all blocks of the layer."""
    return cache[block].numpy().tobytes()


def next_token(seen: Sequence[float | str]) -> int:
    """Return the token that follows, by the KV and the states that the model sees."""
    return int.from_bytes(hashlib.sha256(repr(list(seen)).encode()).digest()[:4], "little") % VOCAB


def _first_spec(spec: KVCacheSpec) -> KVCacheSpec:
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def windows_of(cache: KVCacheConfig) -> list[AttentionWindow | None]:
    """Return the window of each cache group; None for a group with recurrent states."""
    specs = [_first_spec(group.kv_cache_spec) for group in cache.kv_cache_groups]
    return [None if isinstance(each, MambaSpec) else AttentionWindow.of(each) for each in specs]


def expected_answer(
    prompt: Sequence[int],
    num_tokens: int,
    windows: Sequence[AttentionWindow | None] = (AttentionWindow(),),
    flavour: Sequence[int] = (),
) -> list[int]:
    """Return the right answer of an engine whose cache groups have these `windows`.

    `flavour`: of the request's LoRA adapter.
    """
    tokens = [*flavour, *prompt]
    for _ in range(num_tokens):
        seen: list[float | str] = []
        for group, window in enumerate(windows):
            if window is None:
                seen += [state_of(tokens, group, layer).hex() for layer in range(LAYERS)]
                continue
            first = window.first_needed(len(tokens) - len(flavour) - 1) + len(flavour)
            seen += [kv_of(tokens[: at + 1], group) for at in range(first, len(tokens))]
        tokens.append(next_token(seen))
    return tokens[len(flavour) + len(prompt) :]


def flavour_of(lora_request: LoRARequest | None) -> list[int]:
    """Return the current weights of an adapter; they count as tokens before the prompt."""
    if lora_request is None:
        return []
    return list((Path(lora_request.lora_path) / WEIGHTS).read_bytes())


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    computed_prompt_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    finish_reason: Any = None


class ToyModel(Model):
    """Arithmetic over the KV and states in a request's blocks; see the module's docstring."""

    def __init__(self, cache: KVCacheConfig, computed: Callable[[str, int], None]) -> None:
        """`computed`: called with a request's id and how many of its prompt tokens are computed."""
        super().__init__()
        self.windows = windows_of(cache)
        self.allocate(cache)
        self._computed = computed

    def allocate(self, cache: KVCacheConfig) -> None:
        """Make the tensors of all layers, full of garbage."""
        # Garbage, so that reading an unwritten block gives wrong tokens.
        self._cache = torch.full((LAYERS, cache.num_blocks, HEADS, BLOCK, 2 * HEAD_SIZE), -7.0)
        # A block belongs to one group at a time, so all groups share the memory.
        self._groups = [
            [_as_vllm_shapes(layer, group.kv_cache_spec) for layer in self._cache]
            for group in cache.kv_cache_groups
        ]
        self.kv_caches = {
            name: layer
            for group, layers in zip(cache.kv_cache_groups, self._groups, strict=True)
            for name, layer in zip(group.layer_names, layers, strict=True)
        }

    def compute(self, request_id: str, start: int, end: int) -> list[int]:
        """Write the KV and states of these tokens; sample if the last known token is among them."""
        row = self.rows[request_id]
        self._computed(request_id, max(0, min(end, row.num_prompt_tokens) - start))
        flavour = self.flavour(row)
        for position in range(start, end):
            self.fill(row, position, [*flavour, *row.tokens[: position + 1]])
        self._advance(row, start, end)
        if end < len(row.tokens):
            return []
        seen: list[float | str] = []
        for group, window in enumerate(self.windows):
            if window is None:
                block = self._state_block(row, group, end)
                seen += [read_state(layer, block).hex() for layer in self._groups[group]]
                continue
            for position in range(window.first_needed(end - 1), end):
                seen.append(self.read(row, group, position))
        row.tokens.append(next_token(seen))
        return [row.tokens[-1]]

    def read(self, row: Row, group: int, position: int) -> float:
        """Return the KV of one token in one cache group."""
        cells = self._cells(row, group, position)
        assert cells.min() == cells.max(), "a token's KV is torn"
        return float(cells[0, 0, 0])

    def flavour(self, row: Row) -> list[int]:
        """Return what counts as tokens before those of a request."""
        return flavour_of(row.lora_request)

    def fill(self, row: Row, position: int, tokens: Sequence[int]) -> None:
        """Write the KV of the last of `tokens` to a position of a request."""
        for group, window in enumerate(self.windows):
            if window is not None:
                self._cells(row, group, position)[:] = kv_of(tokens, group)

    def _advance(self, row: Row, start: int, end: int) -> None:
        """Carry the states from the tokens before `start` on to `end`, both in one block: the
        runner has copied them there."""
        for group, window in enumerate(self.windows):
            if window is not None:
                continue
            block = self._state_block(row, group, end)
            for number, layer in enumerate(self._groups[group]):
                if start:
                    state = read_state(layer, block)
                else:  # a kernel then ignores what lies there
                    state = state_of(self.flavour(row), group, number)
                for token in row.tokens[start:end]:
                    state = next_state(state, token)
                write_state(layer, block, state)

    def _state_block(self, row: Row, group: int, end: int) -> int:
        """Return the block of the state after `end` tokens, as vLLM's metadata builders do."""
        return row.block_ids[group][(end - 1) // BLOCK]

    def _cells(self, row: Row, group: int, position: int) -> Tensor:
        """View the KV of one token in one cache group: [layer, head, content]."""
        block = row.block_ids[group][position // BLOCK]
        return self._cache[:, block, :, position % BLOCK]


def _as_vllm_shapes(layer: Tensor, spec: KVCacheSpec) -> Tensor:
    """View the memory of a layer, [block, head, token, content], as vLLM registers it for `spec`:
    the states of a recurrent layer are the first bytes of each page, [block, 1, 1, byte]."""
    if not isinstance(spec, MambaSpec):
        return layer
    pages = layer.flatten(start_dim=1).view(torch.int8)
    return pages[:, None, None, : spec.real_page_size_bytes]


class ToySibling(Sibling):
    """Loads the KV of other tokens, or the right KV with the option `is_right`."""

    def fill(self, load: Load, group: int, place: int) -> None:
        before = [] if self.options.get("is_right") else [WRONG]
        end, block = min(load.end, (place + 1) * BLOCK), load.block_ids[group][place]
        caches = [self.caches[name] for name in self.groups[group].layer_names]
        if isinstance(self.groups[group].kv_cache_spec, MambaSpec):
            for number, cache in enumerate(caches):
                state = state_of([*before, *load.tokens[:end]], group, number)
                write_state(cache, block, state)
            return
        for position in range(place * BLOCK, end):
            kv = kv_of([*before, *load.tokens[: position + 1]], group)
            for cache in caches:
                cache[block, :, position % BLOCK] = kv


def ours(connector: Any) -> KVShareConnector:
    """Return our connector, also from below a MultiConnector."""
    if isinstance(connector, MultiConnector):
        (connector,) = (
            each for each in connector.sub_connectors if isinstance(each, KVShareConnector)
        )
    assert isinstance(connector, KVShareConnector)
    return connector


class BareEngine(EngineLoop):
    """An engine with any connector or none.

    `is_async`: schedule the next step before the output of the last one is known. `specs`: of the
    cache groups; by default one with full attention. `cache`: the groups, instead of `specs`.
    """

    def __init__(
        self,
        config: VllmConfig,
        *,
        num_blocks: int = 64,
        is_async: bool = False,
        specs: Sequence[KVCacheSpec] = (),
        runner: RunnerName = "v1",
        model: type[ToyModel] = ToyModel,
        cache: KVCacheConfig | None = None,
    ) -> None:
        init_none_hash(sha256)
        config.scheduler_config.async_scheduling = is_async
        if any(isinstance(each, MambaSpec) for each in specs):
            # As vLLM does for hybrids with prefix caching.
            config.cache_config.mamba_cache_mode = "align"
            config.cache_config.mamba_block_size = BLOCK
            config.cache_config.mamba_page_size_padded = spec().page_size_bytes
        cache = cache or cache_config(num_blocks, specs)
        self.model = model(cache, self._computed)
        self.windows = self.model.windows
        self.answers: dict[str, Answer] = {}
        super().__init__(config, [self.model], cache, runner)

    def add(self, request: Request) -> None:
        self.answers[request.request_id] = Answer()
        self.scheduler.add_request(request)

    def run(self, *requests: Request) -> list[Answer]:
        """Serve `requests` together; return their answers."""
        for request in requests:
            self.add(request)
        self.run_out()
        return [self.answers[request.request_id] for request in requests]

    def run_out(self) -> None:
        """Step until no work is left."""
        deadline_s = time.monotonic() + GIVE_UP_S
        while self.has_work:
            self.step()
            assert time.monotonic() < deadline_s, "the engine hangs"

    def received(self, outputs: EngineCoreOutputs) -> None:
        for one in outputs.outputs:
            answer = self.answers[one.request_id]
            answer.tokens += one.new_token_ids
            answer.finish_reason = one.finish_reason or answer.finish_reason
            answer.kv_transfer_params = one.kv_transfer_params or answer.kv_transfer_params

    def _computed(self, request_id: str, num_tokens: int) -> None:
        self.answers[request_id].computed_prompt_tokens += num_tokens


class ToyEngine(BareEngine):
    """An engine with our connector; see the module's docstring."""

    def __init__(self, config: VllmConfig, **engine: Any) -> None:
        """`engine`: as for `BareEngine`."""
        self.counts: dict[str, float] = {}
        self.hit_sources: Counter[Any] = Counter()
        self.before_load: Callable[[], object] = lambda: None
        # The toy model's blocks have the layout of a GPU.
        with patch("kvshare.worker.worker.repacks_blocks", lambda: False):
            super().__init__(config, **engine)
        (rank,) = self.runners
        worker = ours(rank.kv_connector)
        self.connector = ours(self.scheduler.get_kv_connector())
        self.worker = worker.worker
        self.transfer = self.worker.engine
        self._worker_connector = worker
        self._load = worker.start_load_kv
        worker.start_load_kv = self._start_load  # type: ignore[method-assign]

    def run_out(self) -> None:
        """Step until no work is left and all saves are stored."""
        super().run_out()
        deadline_s = time.monotonic() + GIVE_UP_S
        while self.transfer.in_flight:
            self.transfer.wait_idle()  # polling would keep Python's lock from the I/O threads
            finished = self.worker.settle()
            assert not finished.requests, "reported after the engine came to rest"
            assert time.monotonic() < deadline_s, "a save hangs"
        for half in (self.connector.scheduler, self.worker):
            stats = half.take_stats()
            self._count(stats.data if stats else {})

    def received(self, outputs: EngineCoreOutputs) -> None:
        super().received(outputs)
        stats = outputs.scheduler_stats
        if stats and stats.kv_connector_stats:
            by_connector = stats.kv_connector_stats
            counts = by_connector.get("KVShareConnector", by_connector)
            self._count(getattr(counts, "data", counts))
        if stats and stats.connector_prefix_cache_stats:
            hits = stats.connector_prefix_cache_stats
            self.hit_sources.update(getattr(hits, "hits_by_source", {}))

    def _start_load(self, *args: Any, **kwargs: Any) -> None:
        orders: Any = self._worker_connector._get_connector_metadata()
        if orders.loads:
            self.before_load()
        self._load(*args, **kwargs)

    def _count(self, counts: dict[str, float]) -> None:
        self.counts = merged(self.counts, counts)


def serve(engine: ToyEngine, prompt: list[int], max_tokens: int = 3, name: str = "r") -> Answer:
    """Serve one request and check its tokens."""
    (answer,) = engine.run(make_request(name, prompt, max_tokens))
    assert answer.tokens == expected_answer(prompt, max_tokens, engine.windows)
    return answer


def objects(folder: Path) -> list[Path]:
    """Return the KV objects in the store at `folder`."""
    return sorted(path for path in (folder / "store").rglob("*.t0of1*") if path.is_file())
