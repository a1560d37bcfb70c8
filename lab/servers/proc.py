# SPDX-License-Identifier: Apache-2.0
"""Facts about processes from the kernel."""

import os
import re
from contextlib import suppress
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NUMBER = re.compile(r"_[0-9]*$")
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
    return _seconds(stat.rpartition(")")[2])


def cpu_s_by_thread(process: int) -> dict[str, float]:
    """Return the CPU seconds of a process's threads that run, by their names without numbers.

    A name has at most 15 characters, and is that of the starting thread if nobody has given one.
    """
    found: dict[str, float] = {}
    for task in Path(f"/proc/{process}/task").glob("*/stat"):
        with suppress(OSError):  # it has ended
            head, _, rest = task.read_text(errors="replace").rpartition(")")
            name = _NUMBER.sub("", head.partition("(")[2])
            found[name] = found.get(name, 0.0) + _seconds(rest)
    return found


def _seconds(stat: str) -> float:
    """Return the CPU seconds in what proc_pid_stat(5) has after the name."""
    fields = stat.split()  # its third field is the first here
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def num_open_files(process: int) -> int:
    """Return the number of open files of a process.

    Raises:
        OSError: the process has ended.
    """
    return sum(1 for _ in Path(f"/proc/{process}/fd").iterdir())


def resident_bytes(process: int) -> int:
    """Return the resident memory of a process.

    Raises:
        OSError: the process has ended.
    """
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * _PAGE_BYTES
