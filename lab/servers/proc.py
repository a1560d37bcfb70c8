# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of a process."""

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def is_there(process: int) -> bool:
    """Return whether there is such a process. One that has ended is, until its parent waits."""
    return Path(f"/proc/{process}").exists()


def cpu_s(process: int) -> float:
    """Return the CPU seconds that it has used, user and system; 0 if it has ended meanwhile."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return 0.0
    fields = stat.rpartition(")")[2].split()  # proc_pid_stat(5): the third field is the first here
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def resident_bytes(process: int) -> int:
    """Return how much of it is in memory.

    Raises:
        OSError: it has ended.
    """
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * _PAGE_BYTES
