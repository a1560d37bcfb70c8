# SPDX-License-Identifier: Apache-2.0
"""Stands in for `python` in a script under test: reports arguments instead of starting a program.

With `-m` it prints one line of JSON. If SOCKET is set, it sends the line there instead, and runs
until the other end is closed. The real Python does everything else.
"""

import json
import os
import socket
import sys

SHOWN = (
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE"),
    "VLLM_ENABLE_V1_MULTIPROCESSING",
)


def main() -> None:
    """Report the arguments, and wait if SOCKET is set."""
    if sys.argv[1] != "-m":
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    shown = {name: os.environ[name] for name in SHOWN if name in os.environ}
    line = json.dumps([sys.argv[1:], shown]) + "\n"
    if "SOCKET" not in os.environ:
        sys.stdout.write(line)
        return
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["SOCKET"])
        connection.sendall(line.encode())
        connection.recv(1)
    sys.exit("the stand-in was told to end")


main()
