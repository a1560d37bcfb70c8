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
    """Whether the batch holds it from its first token, and knows the slot of each."""

    @property
    def num_tokens(self) -> int:
        """Of this batch."""
        return self.end - self.start


class Batch:
    """What this connector reads of vLLM's `model_input`, which it does not change.

    `input_tokens` [n]: of all sequences, one behind the other. `input_positions` [n].
    `attn_metadata.seq_lens`: list, tokens of each sequence, those computed earlier included.
    `attn_metadata.slot_mapping` [n]: the cache slot of each token, block * block size + offset,
    -1 for padding. `attn_metadata.num_prefill_tokens`: prompts lie first, sequences that decode
    behind them. `attn_metadata.query_start_loc` [sequences + 1]: where each begins, if it is known;
    else they lie as `seq_lens` say.
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
        prompts = []
        for start, end in pairwise(starts):
            if start >= self.attention.num_prefill_tokens:
                break
            is_first = positions is None or int(positions[start]) == 0
            prompts.append(
                Prompt(start, end, is_first and bool((self.slots[start:end] >= 0).all()))
            )
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

    def without(self, computed: list[int]) -> Any:
        """Return a model input that leaves out the first `computed` tokens of each prompt.

        Fields that say how much of a sequence was computed before, where there are any, say so.
        """
        kept = torch.ones(len(self.tokens), dtype=torch.bool)
        for prompt, count in zip(self.prompts, computed, strict=True):
            kept[prompt.start : prompt.start + count] = False
        index = kept.nonzero().flatten().to(self.tokens.device)
        adjusted, attention = copy.copy(self.model_input), copy.copy(self.attention)
        adjusted.input_tokens = self.tokens[index]
        if getattr(adjusted, "input_positions", None) is not None:
            adjusted.input_positions = adjusted.input_positions[index]
        attention.slot_mapping = self.slots[index.to(self.slots.device)]
        attention.num_prefill_tokens = int(self.attention.num_prefill_tokens) - sum(computed)
        self._shift(attention, computed)
        adjusted.attn_metadata = attention
        return adjusted

    def _shift(self, attention: Any, computed: list[int]) -> None:
        """Correct the fields of `attention` that count tokens by sequence."""
        starts = self._starts()
        skipped = [*computed, *[0] * (len(starts) - 1 - len(computed))]
        lengths = [
            end - start - skip
            for start, end, skip in zip(starts, starts[1:], skipped, strict=False)
        ]
        if getattr(attention, "query_start_loc", None) is not None:
            new_starts = torch.tensor([0, *lengths]).cumsum(0)
            attention.query_start_loc = new_starts.to(attention.query_start_loc)
        if getattr(attention, "context_lens_tensor", None) is not None:
            before = attention.context_lens_tensor
            attention.context_lens_tensor = before + torch.tensor(skipped).to(before)
        if getattr(attention, "max_query_len", None) is not None:
            attention.max_query_len = max(lengths)
