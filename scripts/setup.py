# SPDX-License-Identifier: Apache-2.0
"""Makes `.venv` with everything that the demo and the tests need. Run by `make setup`.

Needs nothing but the standard library. Does nothing if nothing changed since it last succeeded.
An older Python 3 must still be able to read this file: it ends with a sentence then.
"""

import sys

FIRST, LAST = (3, 11), (3, 14)  # the versions that vLLM's CPU build supports


def main() -> int:
    """Set up if needed; 0, or 1 with one sentence that names the log file."""
    if not FIRST <= sys.version_info[:2] <= LAST:
        here = ".".join(map(str, sys.version_info[:2]))
        fix = "name another one: make PYTHON=python3.12 ..."
        print(f"setup failed: this is Python {here}, 3.11 to 3.14 will do; {fix}", file=sys.stderr)
        return 1
    if not sys.platform.startswith("linux"):
        print("setup failed: vLLM's CPU build is for Linux; use a Linux host", file=sys.stderr)
        return 1
    from environment import CACHE, ROOT, Environment, StepFailed  # an older Python cannot read it

    development = Environment(
        ROOT / ".venv",
        ("-e", ".[cpu,s3,router,dev]"),
        log=CACHE / "setup.log",
        constraints=ROOT / "constraints.txt",
    )
    try:
        development.set_up()
    except StepFailed as failed:
        log = development.log.relative_to(ROOT)
        print(f"setup failed: {failed}. The log is {log}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
