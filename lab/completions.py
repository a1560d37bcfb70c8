# SPDX-License-Identifier: Apache-2.0
"""Chat completions to send to a router by the thousand, of text and of pictures."""

import base64
import random
from collections.abc import Sequence

from lab.http_load import Message, Reply, post

COMPLETIONS = "/v1/chat/completions"
TEXT, NEW, KNOWN, AGAIN = "text", "new picture", "known picture", "asked before"
KINDS = (TEXT, NEW, KNOWN, AGAIN)
"""AGAIN repeats one of a few questions about a picture; every other request is new."""
_NUM_KNOWN = 16
_SLOT = 12
"""The number of base64 characters that hold a picture's number. Digits are valid base64."""


class Requests:
    """Chat completions, of any kind."""

    def __init__(self, picture_bytes: int) -> None:
        self._pixels = base64.b64encode(random.Random(0).randbytes(picture_bytes))[_SLOT:]
        self._number = 0

    def next(self, kind: str, *, streams: bool = False) -> Message:
        """Return the next request of one of KINDS."""
        self._number += 1
        known = self._number % _NUM_KNOWN
        picture = self._number + _NUM_KNOWN if kind == NEW else known
        question = known if kind == AGAIN else self._number + _NUM_KNOWN
        shown = [] if kind == TEXT else self._picture(picture)
        return post(
            COMPLETIONS,
            b'{"model":"stand-in","messages":[{"role":"user","content":[',
            b'{"type":"text","text":"Question %d: what is to be seen?"}' % question,
            *shown,
            b']}],"max_tokens":16,"stream":%b}' % (b"true" if streams else b"false"),
        )

    def _picture(self, number: int) -> list[bytes]:
        start = b',{"type":"image_url","image_url":{"url":"data:image/png;base64,%0*d'
        return [start % (_SLOT, number), self._pixels, b'"}}']


def num_lost(replies: Sequence[Reply]) -> int:
    """Return the number of requests that were not answered with status 200."""
    return sum(reply.status != 200 for reply in replies)
