# SPDX-License-Identifier: Apache-2.0
"""The batch that a model runner of the time before V1 is about to run."""

import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Prompt:
    """Where one prompt lies in a batch."""

    start: int
    end: int
    is_whole: bool
    """Whether the batch holds it from its first token, knows the slot of each, and nothing but the
    tokens tells what their KV is."""

    @property
    def num_tokens(self) -> int:
        """Of this batch."""
        return self.end - self.start


# Fields that change the KV of the same tokens: pictures, adapters.
_BESIDE_TOKENS = (
    "multi_modal_kwargs",
    "inputs_embeds",
    "lora_requests",
    "prompt_adapter_requests",
)


class Batch:
    """What this connector reads of vLLM's `model_input`, which it does not change.

    `input_tokens` [n]: of all sequences, one behind the other. `input_positions` [n].
    `attn_metadata.seq_lens`: list, tokens of each sequence, those computed earlier included.
    `attn_metadata.slot_mapping` [n]: the cache slot of each token, block * block size + offset,
    -1 for padding. `attn_metadata.num_prefill_tokens`: prompts lie first, sequences that decode
    behind them. `attn_metadata.query_start_loc` [sequences + 1]: where each begins, if it is known;
    else they lie as `seq_lens` say.

    Where they are, these are corrected as well: `query_lens`; `sampling_metadata`: which tokens'
    states are sampled from, `selected_token_indices` [m], and its `seq_groups[].query_len`;
    `attn_metadata.block_tables` [sequences, blocks], `context_lens_tensor` [sequences].

    Of a batch with pictures or adapters (`multi_modal_kwargs`, `inputs_embeds`, `lora_requests`,
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
        beside = (getattr(self.model_input, name, None) for name in _BESIDE_TOKENS)
        is_told = all(
            each is None or (not isinstance(each, Tensor) and not each) for each in beside
        )
        prompts = []
        for start, end in pairwise(starts):
            if start >= self.attention.num_prefill_tokens:
                break
            is_first = positions is None or not positions[..., start].any()
            has_slots = bool((self.slots[start:end] >= 0).all())
            prompts.append(Prompt(start, end, is_told and is_first and has_slots))
        return prompts

    def _starts(self) -> list[int]:
        known = getattr(self.attention, "query_start_loc", None)
        if known is not None:
            return [int(start) for start in known]
        starts = [0]
        for length in self.attention.seq_lens:
            starts.append(starts[-1] + int(length))
        return starts

    def but_last(self, counts: list[int]) -> list[int]:
        """Return `counts` of first tokens, less where one is a whole prompt: the model must run."""
        return [
            min(count, prompt.num_tokens - 1)
            for count, prompt in zip(counts, self.prompts, strict=True)
        ]

    def without(self, computed: list[int], block_size: int) -> Any:
        """Return a model input that leaves out the first `computed` tokens of each prompt.

        Fields that follow from which tokens there are, where there are any, say so; `block_size` is
        that of the caches. The runner's own objects stay as they are. The input as it is, where the
        states of a token that would be left out are asked for (log probabilities of the prompt) and
        where a mapping tells adapters by token.
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
        return _changed(self.model_input, fields)

    def _sampling(self, sampling: Any, kept: Tensor, lengths: list[int]) -> Any:
        """Return where the states lie that are sampled from."""
        selected = sampling.selected_token_indices
        fields: dict[str, Any] = {
            "selected_token_indices": (kept.cumsum(0) - 1)[selected.cpu()].to(selected)
        }
        if groups := getattr(sampling, "seq_groups", None):  # prompts first; one sequence each
            prompts = zip(groups, lengths[: len(self.prompts)], strict=False)
            adjusted = [_changed(group, {"query_len": length}) for group, length in prompts]
            fields["seq_groups"] = [*adjusted, *groups[len(adjusted) :]]
        return _changed(sampling, fields)

    def _attention(
        self, index: Tensor, skipped: list[int], lengths: list[int], block_size: int
    ) -> Any:
        """Return `attn_metadata` of the tokens at `index`."""
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
                fields[name] = None  # vLLM's own, made of the fields above
        return _changed(before, fields)

    def _tables(self, tables: Tensor, block_size: int) -> Tensor:
        """Return the blocks of each sequence; vLLM gives none of a prompt that begins."""
        rows = [*tables.unbind()]
        for number, prompt in enumerate(self.prompts):
            if prompt.is_whole:
                slots = self.slots[prompt.start : prompt.end : block_size]
                rows[number] = (slots // block_size).to(tables)
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _changed(thing: Any, fields: dict[str, Any]) -> Any:
    """Return a copy of `thing` with other `fields`; some of vLLM's classes are frozen."""
    changed = copy.copy(thing)
    for name, value in fields.items():
        object.__setattr__(changed, name, value)
    return changed
