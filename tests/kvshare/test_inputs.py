# SPDX-License-Identifier: Apache-2.0
"""Each field of a request is classified: if it changes KV or embeddings, what key part covers it?

What vLLM's block hashes and media identifiers leave out would give two different objects one name,
for the whole fleet. When a release adds a field, this test fails until somebody has read what vLLM
does with it. A release may lack a field.
"""

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request, StreamingUpdate

from kvshare.chunks.prefix import Grid, prompt_chunks
from tests.kvshare.conftest import StartEngine
from tests.kvshare.toy import BLOCK, objects

Classes = dict[str, str]

NAMED = "part of the key"
REFUSED = "nothing is shared"
ANSWER = "decides what is answered, not KV: the answer's tokens are part of its names"
ACCOUNT = "bookkeeping of the engine, or a position"
OURS = "says what is stored, looked up or awaited, not what is computed"


def classified(reason: str, names: str) -> Classes:
    return dict.fromkeys(names.split(), reason)


# The tokens of a prompt with embeddings are hashed as 0, and the embeddings' bytes beside them.
INPUTS = (
    classified(NAMED, "prompt_token_ids prompt_embeds mm_features lora_request cache_salt")
    | classified(REFUSED, "prompt_is_token_ids")
    | classified(ANSWER, "sampling_params")  # classified below, and so are the next ones
    | classified("see the tables of their fields", "pooling_params")
)
ENGINE_CORE_REQUEST = (
    INPUTS
    | classified(ACCOUNT, "request_id arrival_time data_parallel_rank client_index current_wave")
    | classified(ACCOUNT, "priority trace_headers external_req_id abort_immediately session_id")
    | classified("further turns are tokens and media of the same request", "resumable")
    | classified(ANSWER, "reasoning_ended reasoning_parser_kwargs")
    | classified("for whom to keep blocks (0.31)", "kv_hints")
)
REQUEST = (
    ENGINE_CORE_REQUEST
    | classified(NAMED, "_prompt_embeds_per_block_hashes block_hashes _block_hasher")
    | classified(NAMED, "_output_token_ids _all_token_ids output_token_ids all_token_ids")
    | classified(ANSWER, "max_tokens structured_output_request stop_reason spec_token_ids")
    | classified(OURS, "kv_transfer_params ec_transfer_params skip_reading_prefix_cache")
    | classified(
        ACCOUNT, "status events kv_cache_report_mode num_prompt_tokens num_computed_tokens"
    )
    | classified(ACCOUNT, "num_output_placeholders num_stale_output_tokens drop_stale_output")
    | classified(ACCOUNT, "num_in_flight_tokens next_decode_eligible_step last_sched_seq")
    | classified(ACCOUNT, "is_prefill_chunk num_nans_in_logits num_preemptions prefill_stats")
    | classified(ACCOUNT, "spec_decode_metrics streaming_queue shared_prefix_boundary")
    | classified("blocks of a window before it are no blocks, and not saved (0.31)", "replay_start")
)
STREAMING_UPDATE = INPUTS | classified(ACCOUNT, "arrival_time") | classified(ANSWER, "max_tokens")
NEW_REQUEST = (
    INPUTS
    | classified(ACCOUNT, "req_id block_ids num_computed_tokens")
    | classified(NAMED, "prefill_token_ids")
    | classified(REQUEST["replay_start"], "replay_start")
)
CACHED_REQUEST = classified(NAMED, "new_token_ids all_token_ids") | classified(
    ACCOUNT, "req_ids resumed_req_ids new_block_ids num_computed_tokens num_output_tokens"
)
MEDIA = (
    classified(NAMED, "identifier mm_position")
    | classified(
        "follows from the identifier, which covers the processor's options", "data mm_hash"
    )
    | classified("follows from the identifier", "modality")
)
PLACE = classified(NAMED, "offset") | classified(
    "follows from identifier and tokens", "length is_embed"
)
ADAPTER = (
    classified(NAMED, "lora_name lora_path is_3d_lora_weight")  # and the content of the files
    | classified(ACCOUNT, "lora_int_id base_model_name")
    | classified("files that have changed are not shared", "load_inplace")
    | classified(REFUSED + " (until 0.31)", "tensorizer_config_dict")
)
SAMPLING = (
    classified(
        ANSWER, "n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k"
    )
    | classified(
        ANSWER, "watermarking _watermarking_skipped min_p seed stop stop_token_ids ignore_eos"
    )
    | classified(ANSWER, "max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids")
    | classified(ANSWER, "prompt_logprob_start logprob_token_ids flat_logprobs detokenize")
    | classified(ANSWER, "skip_special_tokens spaces_between_special_tokens output_kind")
    | classified(ANSWER, "include_stop_str_in_output stream_interval skip_clone _eos_token_id")
    | classified(
        ANSWER, "output_text_buffer_length _all_stop_token_ids structured_outputs logit_bias"
    )
    | classified(ANSWER, "allowed_token_ids bad_words _bad_words_token_ids thinking_token_budget")
    | classified(ANSWER, "repetition_detection routed_experts_prompt_start trace_decode_token_ids")
    | classified(OURS, "skip_reading_prefix_cache")
    | classified("transfer params, and arguments of logits processors", "extra_args")
)
POOLING = (
    classified(ANSWER, "use_activation dimensions step_tag_id returned_token_ids task output_kind")
    | classified(
        ANSWER, "requires_token_ids late_interaction_params late_chunking_params"
    )  # last: 0.33
    | classified(OURS, "skip_reading_prefix_cache")
    | classified("token types, for models that keep no KV: BERT and RoBERTa", "extra_kwargs")
)

TOKENS = list(range(2 * BLOCK + 3))


def names_in(kind: type) -> set[str]:
    return {each.name for each in fields(kind)} if is_dataclass(kind) else set(struct_fields(kind))


def struct_fields(kind: Any) -> tuple[str, ...]:
    names: tuple[str, ...] = kind.__struct_fields__
    return names


@pytest.mark.parametrize(
    ("kind", "classes"),
    [
        (EngineCoreRequest, ENGINE_CORE_REQUEST),
        (StreamingUpdate, STREAMING_UPDATE),
        (NewRequestData, NEW_REQUEST),
        (CachedRequestData, CACHED_REQUEST),
        (MultiModalFeatureSpec, MEDIA),
        (PlaceholderRange, PLACE),
        (LoRARequest, ADAPTER),
        (SamplingParams, SAMPLING),
        (PoolingParams, POOLING),
    ],
)
def test_every_field_of_vllms_types_is_classified(kind: type, classes: Classes) -> None:
    unclassified = names_in(kind) - classes.keys()
    assert not unclassified, (
        f"does one of these change KV or embeddings? {kind.__name__}: {unclassified}"
    )


def asking(**more: Any) -> Request:
    said: dict[str, Any] = {"request_id": "r", "prompt_token_ids": TOKENS}
    said["sampling_params"] = SamplingParams()
    said |= {"pooling_params": None} | more
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request(**said, block_hasher=hasher)


@pytest.mark.parametrize(
    "params",
    [{}, {"sampling_params": None, "pooling_params": PoolingParams(task="embed")}],
)
def test_every_attribute_of_the_scheduler_request_is_classified(params: dict[str, Any]) -> None:
    init_none_hash(sha256)
    unclassified = vars(asking(**params)).keys() - REQUEST.keys()
    assert not unclassified, f"does one of these change KV or embeddings? {unclassified}"


def test_prompt_mixing_tokens_and_embeddings_is_not_shared(start: StartEngine) -> None:
    """All three prompts have equal chunk keys, although only one has nothing but embeddings."""
    engine, names = start(), set()
    for mask in ([True] * len(TOKENS), [True] * BLOCK + [False] * (BLOCK + 3), None):
        request = asking(
            prompt_token_ids=[0] * len(TOKENS),
            prompt_embeds=torch.zeros(len(TOKENS), 8),
            prompt_is_token_ids=mask,
        )
        chunks = prompt_chunks(request, Grid(BLOCK, 1), sha256)
        names.add(tuple(chunk.key for chunk in chunks))
        half = engine.connector.scheduler
        is_looked_up = half.num_loadable_tokens(request, 0) is None
        assert is_looked_up is (mask is None)
        half.finished(request)
    assert len(names) == 1, "vLLM tells them apart now: share them"


def test_blocks_of_a_mixed_prompt_are_not_saved_for_another_prompt(
    start: StartEngine, tmp_path: Path
) -> None:
    engine = start()
    for name, mask in (("mixed", [True] * len(TOKENS)), ("embeddings", None)):
        request = asking(
            request_id=name,
            prompt_token_ids=[0] * len(TOKENS),
            prompt_embeds=torch.zeros(len(TOKENS), 8),
            prompt_is_token_ids=mask,
            sampling_params=SamplingParams(max_tokens=1),
        )
        (answer,) = engine.run(request)
    assert answer.computed_prompt_tokens == 3, "vLLM tells them apart now: this is not needed"
    assert objects(tmp_path) == []
    assert engine.scheduler.reset_prefix_cache()
    engine.run(
        asking(
            request_id="alone",
            prompt_token_ids=[0] * len(TOKENS),
            prompt_embeds=torch.zeros(len(TOKENS), 8),
            sampling_params=SamplingParams(max_tokens=1),
        )
    )
    assert len(objects(tmp_path)) == 3
