# SPDX-License-Identifier: Apache-2.0
"""A program for the tests of the fork server: `python -m tests.lab.forked_program WHAT`."""

import json
import multiprocessing
import os
import signal
import sys
import time


def facts() -> dict[str, object]:
    """Return what a program may see of the process that it runs in."""
    return {
        "pid": os.getpid(),
        "session": os.getsid(0),
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "is_imported": "xml.dom.minidom" in sys.modules,
    }


def say_facts() -> None:
    """Print `facts` as JSON, from a process that was spawned."""
    print(json.dumps(facts()), flush=True)


def main(what: str) -> int:
    """Do `what`, and return the exit status."""
    if what == "facts":
        say_facts()
    elif what == "spawn":
        os.environ["SET_BY_PARENT"] = "yes"
        del os.environ["ONE"]
        child = multiprocessing.get_context("spawn").Process(target=say_facts)
        child.start()
        child.join()
        return child.exitcode or 0
    elif what == "fail":
        raise ValueError("as it was told to")
    elif what == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,)).start()
        print("hangs", flush=True)
        time.sleep(600)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
