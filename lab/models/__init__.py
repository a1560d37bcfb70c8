# SPDX-License-Identifier: Apache-2.0
"""Small models with random weights, for tests and demos.

They are real checkpoints of real architectures, a few MB each, so that every stage of vLLM runs,
also with `--tensor-parallel-size 2`. Their answers mean nothing, but they depend on the prompt, the
media and the seed (see `building.draw_weights`): an engine that loses an embedding or a KV block
answers with other tokens.

    python -m lab.models qwen2.5-vl DIR [--seed N]

Some families add a feature: `qwen2.5-vl` pictures of any size and videos, `qwen3-vl` embeddings
wider than the language model (DeepStack), `llava` prompts whose placeholders depend on the
pixels, `qwen2-audio` sound. `qwen2` is text-only, and so are `gemma3`, in which two of three layers
have a sliding window, `deepseek-v2`, whose attention is latent (MLA), and `lfm2` and
`qwen3.5-text`, in which every other layer is recurrent. The others are there to be tried:
docs/models.md lists them, and which are not made here and why. `drafts` has draft models for
`qwen2`.
"""

from collections.abc import Callable
from pathlib import Path

from lab.models.attention import make_deepseek_v2, make_gemma3
from lab.models.audio import make_audio_flamingo3, make_qwen2_audio
from lab.models.cohere import make_cohere2_vision
from lab.models.gemma import make_gemma3_vl, make_gemma4
from lab.models.glm import make_glm4v
from lab.models.hybrid import make_lfm2, make_qwen3_5
from lab.models.idefics import make_idefics3
from lab.models.internvl import make_internvl
from lab.models.kimi import make_kimi_vl
from lab.models.lfm import make_lfm2_vl
from lab.models.llama import make_llama4
from lab.models.llava import make_llava, make_llava_next, make_llava_onevision
from lab.models.minicpm import make_minicpmv
from lab.models.mistral import make_mistral3
from lab.models.qwen_omni import make_qwen3_omni, make_qwen25_omni
from lab.models.qwen_vl import make_qwen2_vl, make_qwen3_vl, make_qwen25_vl, make_qwen35_vl
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
    "audio-flamingo3": make_audio_flamingo3,
    "cohere2-vision": make_cohere2_vision,
    "deepseek-v2": make_deepseek_v2,
    "gemma3": make_gemma3,
    "gemma3-vl": make_gemma3_vl,
    "gemma4": make_gemma4,
    "glm4v": make_glm4v,
    "idefics3": make_idefics3,
    "internvl": make_internvl,
    "kimi-vl": make_kimi_vl,
    "lfm2": make_lfm2,
    "lfm2-vl": make_lfm2_vl,
    "llama4": make_llama4,
    "llava": make_llava,
    "llava-next": make_llava_next,
    "llava-onevision": make_llava_onevision,
    "minicpmv": make_minicpmv,
    "mistral3": make_mistral3,
    "qwen2": make_qwen2,
    "qwen2-audio": make_qwen2_audio,
    "qwen2-vl": make_qwen2_vl,
    "qwen2.5-omni": make_qwen25_omni,
    "qwen2.5-vl": make_qwen25_vl,
    "qwen3-omni": make_qwen3_omni,
    "qwen3-vl": make_qwen3_vl,
    "qwen3.5-text": make_qwen3_5,
    "qwen3.5-vl": make_qwen35_vl,
}
