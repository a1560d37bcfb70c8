# SPDX-License-Identifier: Apache-2.0
"""The check of a block's inner layout, with vLLM's own CPU kernels."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvshare.chunks.layers import AttentionWindow, LayerSet
from kvshare.worker.blocks import BlockCaches
from kvshare.worker.layout_check import BlockLayout, LayoutCheck, LayoutCheckError
from tests.kvshare.toy import options, vllm_config

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="tries the kernels of a CPU")

BLOCKS, TOKENS, HEAD_SIZE, LAYERS = 4, 64, 32, 2
RELEASE = "0.32.0"
Change = Callable[..., Any]


class Engine:
    """The attention layers of an engine, with their caches."""

    def __init__(
        self,
        config: VllmConfig,
        *,
        heads: int = 2,
        dtype: torch.dtype = torch.float32,
        cache_dtype: str = "auto",
        num_groups: int = 1,
    ) -> None:
        current_platform.import_kernels()
        config.model_config.dtype = dtype
        config.cache_config.block_size = TOKENS
        config.cache_config.cache_dtype = cache_dtype  # type: ignore[assignment]
        names = [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]
        self.layers: dict[str, Any] = config.compilation_config.static_forward_context
        self.layers.clear()
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with set_current_vllm_config(config):
                for name in names:
                    cache = config.cache_config
                    Attention(heads, HEAD_SIZE, 1.0, heads, cache_config=cache, prefix=name)
        finally:
            torch.set_default_dtype(before)
        kept = torch.uint8 if cache_dtype != "auto" else dtype
        spec = FullAttentionSpec(
            block_size=TOKENS, num_kv_heads=heads, head_size=HEAD_SIZE, dtype=kept
        )
        builder = self.layers[names[0]].get_attn_backend().get_builder_cls()
        builder(spec, names, config, torch.device("cpu"))  # tells layers which kernel they take
        self.caches: dict[str, Tensor] = {}
        # The groups share memory.
        memory = torch.randint(0, 100, (LAYERS, BLOCKS, heads, TOKENS, 2 * HEAD_SIZE)).to(kept)
        for number, name in enumerate(names):
            self.caches[name] = memory[number // num_groups]
            self.layers[name].bind_kv_cache(self.caches[name])
        groups = tuple(range(num_groups))
        members = tuple((name, number % num_groups) for number, name in enumerate(names))
        self.layer_set = LayerSet(0, groups, members, AttentionWindow(), heads, heads)
        self.dtype = dtype

    def layout(self, release: str = RELEASE, *, is_opaque: bool = False) -> BlockLayout:
        blocks = BlockCaches(self.caches, self.layer_set, BLOCKS, TOKENS)
        check = LayoutCheck(self.layers, self.dtype, release)
        return layout(check, blocks, len(self.layer_set.groups), is_opaque=is_opaque)

    def change(self, change: Change) -> None:
        """Replace the write of all layers by `change(write, layer, k, v, cache, slots)`."""
        for layer in self.layers.values():
            write = layer.impl.do_kv_cache_update
            layer.impl.do_kv_cache_update = lambda *given, write=write: change(write, *given)


def layout(
    check: LayoutCheck, blocks: BlockCaches, num_groups: int = 1, *, is_opaque: bool = False
) -> BlockLayout:
    block_ids = (BLOCKS - 1, BLOCKS - 2)[:num_groups]
    return check.layout_of(blocks, block_ids, TOKENS, is_opaque=is_opaque)


@pytest.fixture
def config(text_model: Path, tmp_path: Path) -> VllmConfig:
    return vllm_config(text_model, options(tmp_path))


def test_engines_that_fill_blocks_alike_get_the_same_digest(config: VllmConfig) -> None:
    """Former content, number of ranks and vLLM release make no difference."""
    found = Engine(config).layout()
    assert len(found.digest) == 16
    assert not found.untried
    assert int(found.digest, 16)
    assert Engine(config).layout() == found
    assert Engine(config, heads=1).layout() == found
    assert Engine(config).layout("0.31.0") == found


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(torch.bfloat16, "auto"), (torch.float16, "auto"), (torch.bfloat16, "fp8")],
)
def test_other_dtypes_give_another_digest(
    config: VllmConfig, dtype: torch.dtype, cache_dtype: str
) -> None:
    plain = Engine(config).layout().digest
    found = Engine(config, dtype=dtype, cache_dtype=cache_dtype).layout()
    assert not found.untried
    assert found.digest != plain


def test_check_restores_the_cache(config: VllmConfig) -> None:
    engine = Engine(config, num_groups=2)
    before = {name: cache.clone() for name, cache in engine.caches.items()}
    engine.layout()
    assert all(torch.equal(cache, before[name]) for name, cache in engine.caches.items())


def test_groups_sharing_memory_are_checked_in_separate_blocks(config: VllmConfig) -> None:
    assert Engine(config, num_groups=2).layout() == Engine(config).layout()


def swapped(write: Change, layer: Any, key: Tensor, value: Tensor, *rest: Any) -> None:
    write(layer, value, key, *rest)


def turned(write: Change, layer: Any, key: Tensor, value: Tensor, *rest: Any) -> None:
    """Write the tokens of a block shifted by one slot."""
    write(layer, key.roll(1, 0).contiguous(), value.roll(1, 0).contiguous(), *rest)


def doubled(write: Change, layer: Any, key: Tensor, value: Tensor, *rest: Any) -> None:
    write(layer, key, value * 2, *rest)


@pytest.mark.parametrize("change", [swapped, turned, doubled])
def test_kernels_that_fill_blocks_differently_have_another_digest(
    config: VllmConfig, change: Change
) -> None:
    plain = Engine(config).layout()
    engine = Engine(config)
    engine.change(change)
    assert engine.layout().digest != plain.digest


def elsewhere(
    write: Change, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor
) -> None:
    write(layer, key, value, cache, slots - TOKENS // 2)


def in_part(
    write: Change, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor
) -> None:
    write(layer, key[1:], value[1:], cache, slots[1:])


def unlike(write: Change, layer: Any, key: Tensor, value: Tensor, *rest: Any) -> None:
    key[:, 1] = key[:, 1].flip(0)
    write(layer, key, value, *rest)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (elsewhere, "of 4096 numbers that the engine wrote to a head of a block, 2048 are where"),
        (in_part, "of 4096 numbers that the engine wrote to a head of a block, 4032 are where"),
        (unlike, "heads of a block were filled alike, but differ"),
    ],
)
def test_check_fails_if_blocks_do_not_hold_the_written_values(
    config: VllmConfig, change: Change, says: str
) -> None:
    engine = Engine(config)
    engine.change(change)
    last = {name: cache[-1].clone() for name, cache in engine.caches.items()}
    with pytest.raises(LayoutCheckError, match=says):
        engine.layout()
    assert all(torch.equal(cache[-1], last[name]) for name, cache in engine.caches.items())


def test_opaque_blocks_are_tried_without_finding_the_written_values(config: VllmConfig) -> None:
    """The digest is of all bytes, the back end and the release."""

    def in_half(write: Change, *given: Any) -> None:
        layer, key, value, *rest = given
        write(layer, key // 2, value // 2, *rest)

    def found(release: str = RELEASE, *changes: Change) -> BlockLayout:
        engine = Engine(config, num_groups=2)
        before = {name: cache.clone() for name, cache in engine.caches.items()}
        for change in changes:
            engine.change(change)
        layout = engine.layout(release, is_opaque=True)
        assert all(torch.equal(cache, before[name]) for name, cache in engine.caches.items())
        return layout

    plain = found()
    assert not plain.untried
    assert found() == plain
    assert plain != Engine(config, num_groups=2).layout()
    changed = [found(RELEASE, change) for change in (swapped, turned, doubled, in_half, unlike)]
    changed.append(found("0.31.0"))
    assert len({each.digest for each in (plain, *changed)}) == 7


def test_opaque_blocks_of_another_back_end_have_another_digest(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(config)
    before = engine.layout(is_opaque=True)
    for layer in engine.layers.values():
        monkeypatch.setattr(layer.get_attn_backend(), "get_name", lambda: "OTHER")
    assert engine.layout(is_opaque=True).digest != before.digest


def test_opaque_check_fails_if_the_engine_writes_nothing_to_the_block(config: VllmConfig) -> None:
    engine = Engine(config)
    engine.change(lambda *_: None)
    with pytest.raises(LayoutCheckError, match="wrote nothing"):
        engine.layout(is_opaque=True)


def test_digest_of_an_uncheckable_kernel_names_back_end_and_release(config: VllmConfig) -> None:
    """The forward pass of some back ends writes to the cache itself."""
    engine = Engine(config)
    found = [engine.layout()]
    for layer in engine.layers.values():
        layer.impl = SimpleNamespace()
    found += [engine.layout(), engine.layout("0.31.0")]
    engine.layers.clear()
    found.append(engine.layout())
    assert [each.untried for each in found] == ["", "CPU_ATTN", "CPU_ATTN", "unknown"]
    assert len({each.digest for each in found}) == 4
    assert engine.layout() == found[-1]


def test_latent_attention_kernel_is_checked(config: VllmConfig) -> None:
    """vLLM has an operation for such caches on any CPU."""
    rank, position = 16, 8
    impl = CPUMLABackend.get_impl_cls()
    layer = SimpleNamespace(
        impl=object.__new__(impl),
        kv_lora_rank=rank,
        qk_rope_head_dim=position,
        kv_cache=torch.zeros(BLOCKS, TOKENS, rank + position),
        kv_cache_dtype="auto",
        _k_scale=torch.ones(1),
        get_attn_backend=lambda: CPUMLABackend,
    )
    layer_set = LayerSet(0, (0,), (("l.0", 0),), AttentionWindow(), 1, 1)
    blocks = BlockCaches({"l.0": layer.kv_cache}, layer_set, BLOCKS, TOKENS)
    found = layout(LayoutCheck({"l.0": layer}, torch.float32, RELEASE), blocks)
    assert not found.untried
    assert not layer.kv_cache.any()


def by_slot(layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write as vLLM's GPU back ends do: K and V of a token and head side by side in [block, head,
    token, 2 * head size]."""
    keys, values = cache.transpose(1, 2).split(HEAD_SIZE, -1)
    size = keys.shape[1]
    keys[slots // size, slots % size] = key
    values[slots // size, slots % size] = value


def head_major(*shape: int) -> Tensor:
    return torch.zeros(shape)


def token_major(blocks: int, heads: int, *inside: int) -> Tensor:
    tokens, content = inside
    return torch.zeros(blocks, tokens, heads, content).transpose(1, 2)


@pytest.mark.parametrize("make", [head_major, token_major])
@pytest.mark.parametrize("kernel_blocks", [1, 4])
def test_compatible_kernels_get_the_same_digest(
    make: Callable[..., Tensor], kernel_blocks: int
) -> None:
    """Axis order in memory and kernel block size make no difference."""

    def found(cache: Tensor, update: Change = by_slot) -> str:
        layer = SimpleNamespace(
            impl=SimpleNamespace(do_kv_cache_update=update),
            num_kv_heads=2,
            head_size=HEAD_SIZE,
            head_size_v=HEAD_SIZE,
            kv_cache=cache,
            get_attn_backend=lambda: SimpleNamespace(forward_includes_kv_cache_update=False),
        )
        layer_set = LayerSet(0, (0,), (("l.0", 0),), AttentionWindow(), 2, 2)
        blocks = BlockCaches({"l.0": cache}, layer_set, BLOCKS, TOKENS)
        return layout(LayoutCheck({"l.0": layer}, torch.float32, RELEASE), blocks).digest

    plain = found(head_major(BLOCKS, 2, TOKENS, 2 * HEAD_SIZE))
    cut = (BLOCKS * kernel_blocks, 2, TOKENS // kernel_blocks, 2 * HEAD_SIZE)
    assert found(make(*cut)) == plain

    def values_first(layer: Any, key: Tensor, value: Tensor, *rest: Any) -> None:
        by_slot(layer, value, key, *rest)

    assert found(make(*cut), values_first) != plain
