# SPDX-License-Identifier: Apache-2.0
"""The batch that a model runner from before V1 is about to run."""

import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Prompt:
    """The position of one prompt in a batch."""

    start: int
    end: int
    is_whole: bool
    """Whether the batch contains it from its first token, with the slots of all tokens, and its KV
    depends on the tokens alone."""

    @property
    def num_tokens(self) -> int:
        """The number of its tokens in this batch."""
        return self.end - self.start


# Inputs besides tokens that change KV: pictures and adapters.
_EXTRA_INPUTS = (
    "multi_modal_kwargs",
    "inputs_embeds",
    "lora_requests",
    "prompt_adapter_requests",
)


class Batch:
    """The parts of vLLM's `model_input` that the connector reads. Nothing is changed in place.

    `input_tokens` [n]: of all sequences, concatenated. `input_positions` [n].
    `attn_metadata.seq_lens`: list, tokens of each sequence, including those computed earlier.
    `attn_metadata.slot_mapping` [n]: the cache slot of each token, block * block size + offset, -1
    for padding. `attn_metadata.num_prefill_tokens`: prompts come first, decoding sequences after
    them. `attn_metadata.query_start_loc` [sequences + 1]: where each sequence begins; if it is
    missing, computed from `seq_lens`.

    These are adjusted as well where they exist: `query_lens`; `sampling_metadata`: the tokens whose
    states are sampled from, `selected_token_indices` [m], and its `seq_groups[].query_len`;
    `attn_metadata.block_tables` [sequences, blocks], `context_lens_tensor` [sequences].

    In a batch with pictures or adapters (`multi_modal_kwargs`, `inputs_embeds`, `lora_requests`,
    `prompt_adapter_requests`) no prompt counts as whole.
    """

    def __init__(self, model_input: Any) -> None:
        self.model_input = model_input
        self.attention = model_input.attn_metadata
        self.tokens: Tensor = model_input.input_tokens
        self.slots: Tensor = self.attention.slot_mapping.flatten()
        self.prompts = self._prompts()
        decoded = int(self.tokens.shape[0]) - int(self.attention.num_prefill_tokens)
        self.is_prefill_only = decoded == 0

    def _prompts(self) -> list[Prompt]:
        starts = self._starts()
        positions = getattr(self.model_input, "input_positions", None)
        beside = (getattr(self.model_input, name, None) for name in _EXTRA_INPUTS)
        depends_on_tokens_alone = all(
            each is None or (not isinstance(each, Tensor) and not each) for each in beside
        )
        prompts = []
        for start, end in pairwise(starts):
            if start >= self.attention.num_prefill_tokens:
                break
            is_first = positions is None or not positions[..., start].any()
            has_slots = bool((self.slots[start:end] >= 0).all())
            prompts.append(Prompt(start, end, depends_on_tokens_alone and is_first and has_slots))
        return prompts

    def _starts(self) -> list[int]:
        known = getattr(self.attention, "query_start_loc", None)
        if known is not None:
            return [int(start) for start in known]
        starts = [0]
        for length in self.attention.seq_lens:
            starts.append(starts[-1] + int(length))
        return starts

    def leaving_one_token(self, counts: list[int]) -> list[int]:
        """Return `counts`, reduced so that at least one token of each prompt remains to be
        computed.
        """
        return [
            min(count, prompt.num_tokens - 1)
            for count, prompt in zip(counts, self.prompts, strict=True)
        ]

    def without_computed(self, computed: list[int], block_size: int) -> Any:
        """Return a model input without the first `computed` tokens of each prompt.

        Fields that depend on the set of tokens are adjusted; `block_size` is that of the caches.
        The runner's own objects stay unchanged. Returns the input itself if the states of a removed
        token are needed (log probabilities of the prompt), or if adapters are mapped by token.
        """
        if getattr(self.model_input, "lora_mapping", None) is not None:
            return self.model_input
        kept = torch.ones(len(self.tokens), dtype=torch.bool)
        for prompt, count in zip(self.prompts, computed, strict=True):
            kept[prompt.start : prompt.start + count] = False
        index = kept.nonzero().flatten().to(self.tokens.device)
        before = [end - start for start, end in pairwise(self._starts())]
        skipped = [*computed, *[0] * (len(before) - len(computed))]
        lengths = [length - skip for length, skip in zip(before, skipped, strict=True)]
        fields: dict[str, Any] = {"input_tokens": self.tokens[index]}
        if (positions := getattr(self.model_input, "input_positions", None)) is not None:
            fields["input_positions"] = positions[..., index]
        if (sampling := getattr(self.model_input, "sampling_metadata", None)) is not None:
            if not bool(kept[sampling.selected_token_indices.cpu()].all()):
                return self.model_input
            fields["sampling_metadata"] = self._sampling(sampling, kept, lengths)
        if getattr(self.model_input, "query_lens", None) is not None:
            fields["query_lens"] = lengths
        fields["attn_metadata"] = self._attention(index, skipped, lengths, block_size)
        return _replaced(self.model_input, fields)

    def _sampling(self, sampling: Any, kept: Tensor, lengths: list[int]) -> Any:
        """Return `sampling_metadata` for the remaining tokens."""
        selected = sampling.selected_token_indices
        fields: dict[str, Any] = {
            "selected_token_indices": (kept.cumsum(0) - 1)[selected.cpu()].to(selected)
        }
        if groups := getattr(sampling, "seq_groups", None):  # prompts first; one sequence each
            prompts = zip(groups, lengths[: len(self.prompts)], strict=False)
            adjusted = [_replaced(group, {"query_len": length}) for group, length in prompts]
            fields["seq_groups"] = [*adjusted, *groups[len(adjusted) :]]
        return _replaced(sampling, fields)

    def _attention(
        self, index: Tensor, skipped: list[int], lengths: list[int], block_size: int
    ) -> Any:
        """Return `attn_metadata` for the tokens at `index`."""
        before = self.attention
        fields: dict[str, Any] = {
            "slot_mapping": self.slots[index.to(self.slots.device)],
            "num_prefill_tokens": int(before.num_prefill_tokens) - sum(skipped),
        }
        if (starts := getattr(before, "query_start_loc", None)) is not None:
            fields["query_start_loc"] = torch.tensor([0, *lengths]).cumsum(0).to(starts)
        if (context := getattr(before, "context_lens_tensor", None)) is not None:
            fields["context_lens_tensor"] = context + torch.tensor(skipped).to(context)
        if getattr(before, "max_query_len", None) is not None:
            fields["max_query_len"] = max(lengths)
        if (tables := getattr(before, "block_tables", None)) is not None:
            fields["block_tables"] = self._tables(tables, block_size)
        for name in ("_cached_prefill_metadata", "_cached_decode_metadata"):
            if hasattr(before, name):
                fields[name] = None  # vLLM's caches of values derived from the fields above
        return _replaced(before, fields)

    def _tables(self, tables: Tensor, block_size: int) -> Tensor:
        """Return the block table of each sequence. vLLM gives none for a new prompt."""
        rows = [*tables.unbind()]
        for number, prompt in enumerate(self.prompts):
            if prompt.is_whole:
                slots = self.slots[prompt.start : prompt.end : block_size]
                rows[number] = (slots // block_size).to(tables)
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _replaced(thing: Any, fields: dict[str, Any]) -> Any:
    """Return a copy of `thing` with other `fields`. Some of vLLM's classes are frozen."""
    changed = copy.copy(thing)
    for name, value in fields.items():
        object.__setattr__(changed, name, value)
    return changed
