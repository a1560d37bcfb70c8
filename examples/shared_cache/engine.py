# SPDX-License-Identifier: Apache-2.0
"""Start one plain vLLM engine that shares what it computes, and report what it reuses.

    python engine.py MODEL OPTIONS QUESTION [QUESTION...]

OPTIONS is the JSON object of options that both connectors take, such as
`{"url": "s3://bucket/prefix"}`; see docs/config.md. Prints one JSON object per question.
"""

import json
import os
import sys
from typing import Any

from PIL import Image, ImageDraw
from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams
from vllm.config import ECTransferConfig, KVTransferConfig


def start_engine(model: str, options: dict[str, Any]) -> LLM:
    """Start an engine that saves and loads embeddings and KV blocks as `options` say."""
    return LLM(
        model=model,
        ec_transfer_config=ECTransferConfig(
            ec_connector="ECShareConnector",
            ec_role="ec_both",
            ec_connector_extra_config=options,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVShareConnector",
            kv_role="kv_both",
            kv_connector_extra_config=options,
        ),
        # The rest is not needed for sharing: a quick start, and the counters read below.
        enforce_eager=True,
        max_model_len=4096,
        limit_mm_per_prompt={"image": 1, "video": 0},
        disable_log_stats=False,
    )


def a_picture() -> Image.Image:
    """Draw a red sun over a green meadow."""
    picture = Image.new("RGB", (448, 336), "skyblue")
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 224, 448, 336), fill="darkgreen")
    draw.ellipse((280, 40, 380, 140), fill="red")
    return picture


def count(event: str) -> int:
    """Return the number of pictures that this engine has `encoded` or `loaded` so far."""
    return sum(
        int(sample.value)
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "ecshare_items_total" and sample.labels["event"] == event
    )


def main() -> None:
    """Ask each question of the command line about the same picture."""
    model, options, *questions = sys.argv[1:]
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB, on CPU engines only
    llm = start_engine(model, json.loads(options))
    greedy = SamplingParams(temperature=0, max_tokens=16)
    for question in questions:
        content = [
            {"type": "text", "text": question},
            {"type": "image_pil", "image_pil": a_picture()},
        ]
        conversation: list[Any] = [{"role": "user", "content": content}]
        before = count("encoded"), count("loaded")
        (answer,) = llm.chat(conversation, greedy, use_tqdm=False)
        prompt_tokens = len(answer.prompt_token_ids or ())
        report = {
            "question": question,
            "answer": answer.outputs[0].text,
            "pictures_encoded": count("encoded") - before[0],
            "pictures_loaded": count("loaded") - before[1],
            "tokens_prefilled": prompt_tokens - (answer.num_cached_tokens or 0),
            "tokens_reused": answer.num_cached_tokens,
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
