# SPDX-License-Identifier: Apache-2.0
"""Small models that see, hear or only read, made on the spot: random weights, seeded, no network.

They are real checkpoints of real architectures, a few MB each, so that every stage of vLLM runs,
also with `--tensor-parallel-size 2`. Their answers mean nothing, but they depend on the prompt, the
picture or sound and the seed (see `building.draw_weights`): whoever loses an embedding or a KV
block gets other tokens.

    python -m lab.models qwen2.5-vl DIR [--seed N]

Each family has something the others have not: `qwen2.5-vl` pictures of any size and videos,
`qwen3-vl` embeddings wider than the language model (DeepStack), `llava` no way to do without the
pixels, `qwen2-audio` sound. `qwen2` reads text alone, and so do
`gemma3`, whose layers look back over a window but for every third, and `deepseek-v2`, whose
attention is latent (MLA).
"""

from collections.abc import Callable
from pathlib import Path

from lab.models.attention import make_deepseek_v2, make_gemma3
from lab.models.audio import make_qwen2_audio
from lab.models.llava import make_llava
from lab.models.qwen_vl import make_qwen3_vl, make_qwen25_vl
from lab.models.text import make_adapter, make_qwen2

__all__ = [
    "FAMILIES",
    "make_adapter",
    "make_deepseek_v2",
    "make_gemma3",
    "make_llava",
    "make_qwen2",
    "make_qwen2_audio",
    "make_qwen3_vl",
    "make_qwen25_vl",
]

# Each writes a checkpoint to a folder that is not there yet, and returns it; the same seed gives
# the same files. Raises FileExistsError if the folder is there.
FAMILIES: dict[str, Callable[[Path, int], Path]] = {
    "deepseek-v2": make_deepseek_v2,
    "gemma3": make_gemma3,
    "llava": make_llava,
    "qwen2": make_qwen2,
    "qwen2-audio": make_qwen2_audio,
    "qwen2.5-vl": make_qwen25_vl,
    "qwen3-vl": make_qwen3_vl,
}
