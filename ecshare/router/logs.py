# SPDX-License-Identifier: Apache-2.0
"""The router's log. Clients can neither forge lines nor flood it."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

_WINDOW_S = 10.0
_LINES_A_WINDOW = 5
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}


def configure() -> None:
    """Log from INFO upwards to stderr. Called once, before the process serves."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLineFormatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(RateLimitFilter(time.monotonic))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class OneLineFormatter(logging.Formatter):
    """Escapes the control characters of messages. Tracebacks keep their lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 — logging's name
        """Return the line without a traceback."""
        return super().formatMessage(record).translate(_CONTROLS)


@dataclass
class _Site:
    """One log call in the code, and what it has logged since `began_s`."""

    began_s: float
    num_lines: int = 0
    num_left_out: int = 0


class RateLimitFilter(logging.Filter):
    """Drops warnings and errors when one log call writes too many in a short time.

    The next line that passes tells how many were dropped. Lines below WARNING always pass: clients
    can trigger only warnings and lines that the operator asked for, such as the access log.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        super().__init__()
        self._clock_s = clock_s
        self._sites: dict[tuple[str, int], _Site] = {}  # bounded: one a log call in the code

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether to write the line."""
        if record.levelno < logging.WARNING:
            return True
        now_s = self._clock_s()
        site = self._sites.setdefault((record.pathname, record.lineno), _Site(now_s))
        num_left_out = 0
        if now_s - site.began_s >= _WINDOW_S:
            num_left_out = site.num_left_out
            site.began_s, site.num_lines, site.num_left_out = now_s, 0, 0
        if site.num_lines >= _LINES_A_WINDOW:
            site.num_left_out += 1
            return False
        site.num_lines += 1
        if num_left_out:
            record.msg = f"{record.getMessage()} ({num_left_out} more like this were left out)"
            record.args = None
        return True
