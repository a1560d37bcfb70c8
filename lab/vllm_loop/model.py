# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a model, and for a runner's state of its requests, in one rank."""

from dataclasses import dataclass

from torch import Tensor
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import DraftTokenIds

_TOKEN = 7


@dataclass
class Row:
    """One request as a model runner knows it."""

    tokens: list[int]
    """The tokens of the prompt, then the sampled ones."""
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[list[int]]
    """The block ids of each cache group."""
    features: list[MultiModalFeatureSpec]
    lora_request: LoRARequest | None


class Model:
    """Remembers requests, encodes nothing and samples the same token again and again.

    Subclasses define the embedding of an item, and the computation of tokens.
    """

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.encoder_cache: dict[str, Tensor] = {}
        self.kv_caches: dict[str, Tensor] = {}
        """The cache of each layer: [block, ...]."""

    def update(self, output: SchedulerOutput) -> None:
        """Take over the scheduler's view of requests and caches."""
        for request_id in output.finished_req_ids:
            self.rows.pop(request_id, None)
        for identifier in output.free_encoder_mm_hashes:
            self.encoder_cache.pop(identifier, None)
        for block_id in output.new_block_ids_to_zero or ():
            for layer in self.kv_caches.values():
                layer[block_id] = 0
        for new in output.scheduled_new_reqs:
            self.rows[new.req_id] = _row_of(new)
        self._update_known(output.scheduled_cached_reqs)

    def _update_known(self, known: CachedRequestData) -> None:
        for request_id, new_ids, num_computed, num_output in zip(
            known.req_ids,
            known.new_block_ids,
            known.num_computed_tokens,
            known.num_output_tokens,
            strict=True,
        ):
            row = self.rows[request_id]
            # Tokens that were sampled from blocks which a connector could not fill were dropped.
            del row.tokens[row.num_prompt_tokens + num_output :]
            if request_id in known.resumed_req_ids:
                row.block_ids = [[] for _ in row.block_ids]
                # Tokens that were sampled meanwhile may be dropped.
                row.tokens = list(known.all_token_ids[request_id])
            for ids, more in zip(row.block_ids, new_ids or (), strict=False):
                ids += more
            row.num_computed_tokens = num_computed

    def to_encode(self, output: SchedulerOutput) -> list[MultiModalFeatureSpec]:
        """Return the items that this step encodes."""
        return [
            feature
            for request_id, indices in output.scheduled_encoder_inputs.items()
            for index in indices
            if (feature := self.rows[request_id].features[index]).data is not None
        ]

    def encode(self, feature: MultiModalFeatureSpec) -> Tensor:
        """Return an item's embedding: [num_embeds, width]."""
        raise NotImplementedError

    def gather(self, output: SchedulerOutput) -> None:
        """Take the embeddings that this step's tokens need from the encoder cache."""

    def forward(self, output: SchedulerOutput) -> list[list[int]]:
        """Compute the step's tokens. Returns the sampled tokens of each request."""
        sampled = []
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            start = self.rows[request_id].num_computed_tokens
            sampled.append(self.compute(request_id, start, start + num_tokens))
        return sampled

    def compute(self, request_id: str, start: int, end: int) -> list[int]:
        """Compute the tokens from `start` to `end`, and append the token that is sampled then."""
        row = self.rows[request_id]
        if end < len(row.tokens):
            return []
        row.tokens.append(_TOKEN)
        return [_TOKEN]

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return guesses of the next tokens; None if this model makes none."""
        return None


def _row_of(new: NewRequestData) -> Row:
    prompt = new.prompt_token_ids or []
    return Row(
        # For the V2 runner a preempted request is a new one, with the tokens that it had sampled.
        tokens=list(new.prefill_token_ids or prompt),
        num_prompt_tokens=len(prompt),
        num_computed_tokens=new.num_computed_tokens,
        block_ids=[list(ids) for ids in new.block_ids],
        features=list(new.mm_features),
        lora_request=new.lora_request,
    )
