# SPDX-License-Identifier: Apache-2.0
"""Facts about processes from the kernel."""

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def is_there(process: int) -> bool:
    """Return whether the process exists. A zombie does, until its parent waits for it."""
    return Path(f"/proc/{process}").exists()


def cpu_s(process: int) -> float:
    """Return the CPU seconds, user and system, of a process; 0 if it has ended meanwhile."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return 0.0
    fields = stat.rpartition(")")[2].split()  # proc_pid_stat(5): the third field is the first here
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def resident_bytes(process: int) -> int:
    """Return the resident memory of a process.

    Raises:
        OSError: the process has ended.
    """
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * _PAGE_BYTES
