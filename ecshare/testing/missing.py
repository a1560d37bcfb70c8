# SPDX-License-Identifier: Apache-2.0
"""One sentence for a package that is not installed."""

import sys
from typing import NoReturn


def explain(missing: ModuleNotFoundError, fix: str) -> NoReturn:
    """Say what is missing and how to get it, from the handler of `missing`.

    Raises:
        SystemExit: the package is being run with `python -m`; the sentence goes to stderr.
        ImportError: it is imported, with that sentence.
        ModuleNotFoundError: `missing` itself, where the missing module is our own.
    """
    package = (missing.name or "ecshare").partition(".")[0]
    if package in ("ecshare", "kvshare"):
        raise missing
    sentence = f"this part of ecshare.testing needs {package}: {fix}"
    if sys.argv[0] == "-m":  # as Python sets it while it looks for the module to run
        sys.exit(sentence)
    raise ImportError(sentence) from missing
