# SPDX-License-Identifier: Apache-2.0
"""The router's log, as clients cannot spoil it: no line is theirs, and they cannot flood it."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

_WINDOW_S = 10.0
_LINES_A_WINDOW = 5
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}


def configure() -> None:
    """Send everything from INFO upwards to stderr. For the process, before it serves."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLineFormatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(RateLimitFilter(time.monotonic))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class OneLineFormatter(logging.Formatter):
    """Shows control characters of a message as escapes. Tracebacks keep their lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 — logging's name
        """Return the line without a traceback."""
        return super().formatMessage(record).translate(_CONTROLS)


@dataclass
class _Site:
    """One line of code that logs, and what it has logged since `began_s`."""

    began_s: float
    num_lines: int = 0
    num_left_out: int = 0


class RateLimitFilter(logging.Filter):
    """Leaves out warnings and errors of which one line of code writes too many in a short time.

    The next one that is written says how many were left out before it. Lines below WARNING pass:
    what clients can trigger is either a warning or asked for, as the access log is.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        super().__init__()
        self._clock_s = clock_s
        self._sites: dict[tuple[str, int], _Site] = {}  # bounded by the code there is

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a line is written."""
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
