# SPDX-License-Identifier: Apache-2.0
"""`python` to a script under test: it does not start vLLM or the router, it says what it was told.

With `-m` it prints one line of JSON. Where SOCKET is set it sends the line there instead, and lives
until the other end is closed. Everything else is done by the real Python.
"""

import json
import os
import socket
import sys

SHOWN = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE")


def main() -> None:
    """Say it, and wait if need be."""
    if sys.argv[1] != "-m":
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    shown = {name: os.environ[name] for name in SHOWN if name in os.environ}
    line = json.dumps([sys.argv[1:], shown]) + "\n"
    if "SOCKET" not in os.environ:
        sys.stdout.write(line)
        return
    with socket.socket(socket.AF_UNIX) as told:
        told.connect(os.environ["SOCKET"])
        told.sendall(line.encode())
        told.recv(1)
    sys.exit("the stand-in was told to end")


main()
