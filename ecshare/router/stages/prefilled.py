# SPDX-License-Identifier: Apache-2.0
"""Which prompts P has stored, so that it is asked only if there is something to prefill.

A prompt is known by the digests of its messages (api/turns.py). A wrong guess costs time only: D
looks KV up by its own tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import msgspec
from msgspec import Struct

from ecshare.router.api.client_request import Request, Turn
from ecshare.router.reuse import BoundedCache
from ecshare.router.siblings import Siblings
from ecshare.router.stages import plan

_TOPIC = "prefilled"
_MAX_ENTRIES = 1_000_000
_ENTRY_BYTES = 500
_CHARS_A_TOKEN = 4
_KEPT_S = 3600.0
"""P is asked again after so long: the store may have lost the KV, and D may store none."""
_MUCH = 0.5
"""D was not served by the store if it has computed more than this share of a known prompt."""
_ON_ITS_WAY_S = 10.0
"""So long after P's answer D is told what P announced, and waits for it. Later D finds it."""


class Known(NamedTuple):
    """A prompt that D can compute the rest of."""

    missing_chars: int
    """How much text D computes, about."""
    hand_over: Request | None
    """What P announced, if it may still be on its way."""


class _Stored(Struct):
    missing_chars: int
    hand_over: Request
    stored_s: float
    answer_bytes: int = 0
    """The size of D's answer to it, as D has sent it."""


class PrefilledPrompts:
    """A bounded index of what is stored, for all requests. Belongs to the event loop's thread."""

    def __init__(
        self,
        max_bytes: int,
        max_new_tokens: int,
        clock_s: Callable[[], float],
        siblings: Siblings,
    ) -> None:
        """`max_new_tokens`: how much text D may compute itself, estimated."""
        self._siblings = siblings
        siblings.hear(_TOPIC, self._hear)
        self._index: BoundedCache[bytes, _Stored] = BoundedCache(_MAX_ENTRIES, max_bytes)
        self._max_new_chars = _CHARS_A_TOKEN * max_new_tokens
        self._clock_s = clock_s
        self._num_asked = 0
        self._num_avoided = 0
        self._num_lost = 0

    def find(self, turns: list[Turn]) -> Known | None:
        """Return what is known of a prompt; None: P is to be asked.

        D's own answer to a known prompt is not new: D has it or has stored it, and to compute it
        once more takes a small part of the time that the answer took.
        """
        new_chars = answer_chars = 0
        for turn in reversed(turns):
            stored = self._index.get(turn.digest)
            if stored is not None:
                return self._known(stored, new_chars - min(answer_chars, stored.answer_bytes))
            new_chars += turn.num_chars
            answer_chars = turn.num_chars if turn.is_answer else 0
            if turn.has_media or new_chars - answer_chars > self._max_new_chars:
                break
        return None

    def _known(self, stored: _Stored, new_chars: int) -> Known | None:
        age_s = self._clock_s() - stored.stored_s
        missing_chars = stored.missing_chars + new_chars
        if age_s >= _KEPT_S or missing_chars > self._max_new_chars:
            return None
        is_on_its_way = age_s < _ON_ITS_WAY_S and not new_chars and stored.hand_over
        return Known(missing_chars, stored.hand_over if is_on_its_way else None)

    def note_prefilled(self, turns: list[Turn], answer: Request) -> None:
        """Note what P's `answer` says that it has stored."""
        self._num_asked += 1
        hand_over = plan.reported_hand_over(answer)
        num_missing = plan.num_missing_tokens(answer)
        if num_missing is None or hand_over is None:
            self.forget(turns)
        else:
            # The rest, if any, has served once.
            stored = {"kvshare": hand_over["kvshare"]}
            self._note(turns, _CHARS_A_TOKEN * num_missing, stored)

    def note_decoded(self, turns: list[Turn], known: Known, answer: Request) -> None:
        """Note D's `answer` to a known prompt. D has stored what was new of it, if it does.

        If D has computed far more than that, the prompt is forgotten: the store has lost it, or is
        too slow for D to load from.
        """
        self._num_avoided += 1
        tokens = plan.prompt_tokens(answer)
        if tokens is not None and self._has_computed_much(tokens):
            self._num_lost += 1
            self.forget(turns)
        elif self._index.get(turns[-1].digest) is None:
            self._note(turns, known.missing_chars, {})

    def _has_computed_much(self, tokens: plan.PromptTokens) -> bool:
        computed = tokens.total - tokens.cached
        is_more_than_new = computed * _CHARS_A_TOKEN > self._max_new_chars
        return is_more_than_new and computed > _MUCH * tokens.total

    def note_done_first(self, turns: list[Turn], answer: Request) -> None:
        """Note that D has answered before P, if its `answer` tells that it has stored the prompt or
        had it.
        """
        tokens = plan.prompt_tokens(answer)
        num_missing = plan.num_missing_tokens(answer)
        if num_missing is None and tokens is not None and not self._has_computed_much(tokens):
            num_missing = max(0, tokens.total - 1 - tokens.cached)
        if turns and num_missing is not None:
            self._note(turns, _CHARS_A_TOKEN * num_missing, {})

    def note_answered(self, turns: list[Turn], num_bytes: int) -> None:
        """Note the size of D's answer, as it was sent, to a prompt that may be known now."""
        stored = self._index.get(turns[-1].digest) if turns else None
        if stored is not None and stored.answer_bytes != num_bytes:
            self._put(turns, msgspec.structs.replace(stored, answer_bytes=num_bytes))

    def forget(self, turns: list[Turn]) -> None:
        """Have P asked for this prompt again."""
        for turn in turns:
            self._index.discard(turn.digest)
            self._siblings.tell(_TOPIC, turn.digest, None)

    def status(self) -> dict[str, int]:
        """Return counts for the status page."""
        return {
            "asked": self._num_asked,
            "avoided": self._num_avoided,
            "lost": self._num_lost,
            "remembered": len(self._index),
            "memory": self._index.num_bytes,
            "evicted": self._index.num_evicted,
        }

    def _note(self, turns: list[Turn], missing_chars: int, hand_over: Request) -> None:
        self._put(turns, _Stored(missing_chars, hand_over, self._clock_s()))

    def _put(self, turns: list[Turn], stored: _Stored) -> None:
        self._index.put(turns[-1].digest, stored, _ENTRY_BYTES)
        if self._siblings.are_there:
            self._siblings.tell(_TOPIC, turns[-1].digest, msgspec.msgpack.encode(stored))

    def _hear(self, digest: bytes, stored: bytes | None) -> None:
        if stored is None:
            self._index.discard(digest)
        else:
            self._index.put(digest, msgspec.msgpack.decode(stored, type=_Stored), _ENTRY_BYTES)
