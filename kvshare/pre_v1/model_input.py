# SPDX-License-Identifier: Apache-2.0
"""The batch that a model runner from before V1 is about to run."""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

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
    """The parts of vLLM's `model_input` that the connector reads.

    `input_tokens` [n]: of all sequences, concatenated. `input_positions` [n].
    `attn_metadata.seq_lens`: list, tokens of each sequence, including those computed earlier.
    `attn_metadata.slot_mapping` [n]: the cache slot of each token, block * block size + offset, -1
    for padding. `attn_metadata.num_prefill_tokens`: prompts come first, decoding sequences after
    them. `attn_metadata.query_start_loc` [sequences + 1]: where each sequence begins; if it is
    missing, computed from `seq_lens`.

    In a batch with pictures or adapters (`multi_modal_kwargs`, `inputs_embeds`, `lora_requests`,
    `prompt_adapter_requests`) no prompt counts as whole.
    """

    def __init__(self, model_input: Any) -> None:
        self._model_input = model_input
        self._attention = model_input.attn_metadata
        self.tokens: Tensor = model_input.input_tokens
        self.slots: Tensor = self._attention.slot_mapping.flatten()
        self.prompts = self._prompts()

    @property
    def holds_whole_prompts(self) -> bool:
        """Return whether it holds whole prompts and nothing else, so that the model need not run if
        their KV is known."""
        num_decoded = len(self.tokens) - int(self._attention.num_prefill_tokens)
        return bool(self.prompts) and not num_decoded and all(p.is_whole for p in self.prompts)

    def _prompts(self) -> list[Prompt]:
        starts = self._starts()
        positions = getattr(self._model_input, "input_positions", None)
        beside = (getattr(self._model_input, name, None) for name in _EXTRA_INPUTS)
        depends_on_tokens_alone = all(
            each is None or (not isinstance(each, Tensor) and not each) for each in beside
        )
        prompts = []
        for start, end in pairwise(starts):
            if start >= self._attention.num_prefill_tokens:
                break
            is_first = positions is None or not positions[..., start].any()
            has_slots = bool((self.slots[start:end] >= 0).all())
            prompts.append(Prompt(start, end, depends_on_tokens_alone and is_first and has_slots))
        return prompts

    def _starts(self) -> list[int]:
        known = getattr(self._attention, "query_start_loc", None)
        if known is not None:
            return [int(start) for start in known]
        return [0, *accumulate(int(length) for length in self._attention.seq_lens)]
