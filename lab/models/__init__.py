# SPDX-License-Identifier: Apache-2.0
"""Small models with random weights, for tests and demos.

They are real checkpoints of real architectures, a few MB each, so that every stage of vLLM runs,
also with `--tensor-parallel-size 2`. Their answers mean nothing, but they depend on the prompt, the
media and the seed (see `building.draw_weights`): an engine that loses an embedding or a KV block
answers with other tokens.

    python -m lab.models qwen2.5-vl DIR [--seed N]

Each family adds a feature: `qwen2.5-vl` pictures of any size and videos, `qwen3-vl` embeddings
wider than the language model (DeepStack), `llava` prompts whose placeholders depend on the
pixels, `qwen2-audio` sound. `qwen2` is text-only, and so are `gemma3`, in which two of three layers
have a sliding window, `deepseek-v2`, whose attention is latent (MLA), `lfm2` and `qwen3.5-text`,
in which every other layer is recurrent.
"""

from collections.abc import Callable
from pathlib import Path

from lab.models.attention import make_deepseek_v2, make_gemma3
from lab.models.audio import make_qwen2_audio
from lab.models.hybrid import make_lfm2, make_qwen3_5
from lab.models.llava import make_llava
from lab.models.qwen_vl import make_qwen3_vl, make_qwen25_vl
from lab.models.text import make_adapter, make_qwen2

__all__ = [
    "FAMILIES",
    "make_adapter",
    "make_deepseek_v2",
    "make_gemma3",
    "make_lfm2",
    "make_llava",
    "make_qwen2",
    "make_qwen2_audio",
    "make_qwen3_5",
    "make_qwen3_vl",
    "make_qwen25_vl",
]

# Each writes a checkpoint to a new folder and returns it; equal seeds give equal files. Raises
# FileExistsError if the folder exists.
FAMILIES: dict[str, Callable[[Path, int], Path]] = {
    "deepseek-v2": make_deepseek_v2,
    "gemma3": make_gemma3,
    "lfm2": make_lfm2,
    "llava": make_llava,
    "qwen2": make_qwen2,
    "qwen2-audio": make_qwen2_audio,
    "qwen2.5-vl": make_qwen25_vl,
    "qwen3-vl": make_qwen3_vl,
    "qwen3.5-text": make_qwen3_5,
}
