# SPDX-License-Identifier: Apache-2.0
"""KV to encode: drawn like published KV of large models, or computed by our small models."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

# An 8B-class model: KV heads, and the width of keys and values together, equal in all layers.
HEADS, TOKENS, HEAD_SIZE = 8, 16, 128
PROMPT_TOKENS = 512
# The number of large key channels, and their scale, in the models that publications measure.
LARGE_CHANNELS, LARGER = 0.03, 12.0
# The number of positions of each prompt at which next tokens are compared.
COMPARED = 128


def drawn(num_layers: int, num_blocks: int, seed: int = 0) -> Tensor:
    """Return bfloat16 [layer, block, head, token, content].

    Each channel has a scale of its own (log-normal, sigma 0.5), and some channels of keys a large
    one.
    """
    chance = torch.Generator().manual_seed(seed)
    shape = (num_layers, 1, HEADS, 1, 2 * HEAD_SIZE)
    scale = torch.exp(0.5 * torch.randn(shape, generator=chance))
    is_large = torch.rand(shape, generator=chance) < LARGE_CHANNELS
    is_large[..., HEAD_SIZE:] = False
    scale[is_large] *= LARGER
    numbers = torch.randn((num_layers, num_blocks, HEADS, TOKENS, 2 * HEAD_SIZE), generator=chance)
    return (numbers * scale).to(torch.bfloat16)


class Agreement(NamedTuple):
    """The effect of changed KV on the next token, over some positions of random prompts."""

    num_positions: int
    equal_percent: float
    """The share of positions with the same most probable token."""
    mean_error: float
    """The mean error of the log-probability of that token."""
    worst_error: float
    far_percent: float
    """The share of equal tokens, among positions whose two best tokens are at least 0.5 apart."""


class SmallModel:
    """A model of lab/models in transformers, on text alone. Its weights are drawn, not trained."""

    def __init__(self, family: str, dtype: torch.dtype) -> None:
        from transformers import AutoModelForImageTextToText

        from lab.models import FAMILIES

        with tempfile.TemporaryDirectory() as folder:
            path = FAMILIES[family](Path(folder) / "model", 0)
            self._model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype).eval()
        self._num_words: int = self._model.config.get_text_config().vocab_size // 2

    @torch.inference_mode()
    def kv(self, num_tokens: int = PROMPT_TOKENS, seed: int = 0) -> Tensor:
        """Return the KV of a random prompt, [layer, block, head, token, content]."""
        cache = self._model(self._prompt(num_tokens, seed), use_cache=True).past_key_values
        rows = torch.stack([torch.cat((each.keys, each.values), -1) for each in cache.layers])
        layers, _, heads, tokens, content = rows.shape
        return rows.view(layers, heads, -1, TOKENS, content).transpose(1, 2).contiguous()

    @torch.inference_mode()
    def agreement(self, change: Any, num_prompts: int) -> Agreement:
        """Compare the next tokens with those after `change` of the prompts' KV.

        Half of a prompt is loaded; every position of the rest is compared.
        """
        pairs = [self._next(change, seed) for seed in range(num_prompts)]
        exact, other = (torch.cat(each) for each in zip(*pairs, strict=True))
        best = exact.argmax(-1)
        is_equal = best == other.argmax(-1)
        ranked = exact.topk(2).values
        is_far = ranked[:, 0] - ranked[:, 1] >= 0.5
        errors = (exact - other).gather(1, best[:, None]).abs()
        return Agreement(
            len(best),
            100 * float(is_equal.float().mean()),
            float(errors.mean()),
            float(errors.max()),
            100 * float(is_equal[is_far].float().mean()),
        )

    def _next(self, change: Any, seed: int) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities at COMPARED positions, with exact and with changed KV."""
        prompt = self._prompt(PROMPT_TOKENS + COMPARED, seed)
        first, rest = prompt[:, :PROMPT_TOKENS], prompt[:, PROMPT_TOKENS:]
        found = []
        for is_changed in (False, True):
            cache = self._model(first, use_cache=True).past_key_values
            if is_changed:
                for layer in cache.layers:
                    both = change(torch.cat((layer.keys, layer.values), -1).contiguous())
                    layer.keys, layer.values = both.split(layer.keys.shape[-1], -1)
            logits = self._model(rest, past_key_values=cache, use_cache=True).logits[0]
            found.append(logits.double().log_softmax(-1))
        return found[0], found[1]

    def _prompt(self, num_tokens: int, seed: int) -> Tensor:
        chance = torch.Generator().manual_seed(seed)
        return torch.randint(10, self._num_words, (1, num_tokens), generator=chance)


def families(*, quick: bool) -> Sequence[str]:
    """Return the names of the models to measure."""
    return ("qwen2.5-vl",) if quick else ("qwen2.5-vl", "qwen3-vl", "llava")
