# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.models`: write a model to a folder."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers.utils import logging as transformers_logging

from lab.models import FAMILIES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0, or 1 with one sentence on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.models",
        description="Make a small model with random weights, for tests.",
    )
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("dir", type=Path, metavar="DIR", help="where to; must not exist yet")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other weights")
    options = parser.parse_args(arguments)
    transformers_logging.disable_progress_bar()
    try:
        FAMILIES[options.family](options.dir, options.seed)
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    print(options.dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
