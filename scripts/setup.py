# SPDX-License-Identifier: Apache-2.0
"""Makes `.venv` with everything that the demo and the tests need. Run by `make setup`.

Runs on any Python >= 3.11 without anything installed. Does nothing if nothing changed since it
last succeeded.
"""

import sys

from environment import CACHE, ROOT, Environment, StepFailed

DEVELOPMENT = Environment(ROOT / ".venv", ("-e", ".[cpu,s3,router,dev]"), log=CACHE / "setup.log")


def main() -> int:
    """Set up if needed; 0, or 1 with one sentence that names the log file."""
    if sys.version_info < (3, 11):  # noqa: UP036 - `python3` may be an older one
        print("ecshare needs Python 3.11 or later: make PYTHON=python3.11 ...", file=sys.stderr)
        return 1
    try:
        DEVELOPMENT.set_up()
    except StepFailed as failed:
        log = DEVELOPMENT.log.relative_to(ROOT)
        print(f"setup failed: {failed}. The log is {log}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
