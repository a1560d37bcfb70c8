# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.conformance`: play the kit against a connector.

Exit status 0 if every rule holds, 1 if one is broken, 2 if the command line is wrong.
"""

import argparse
import faulthandler
import importlib
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm import __version__ as vllm_version

from lab import model_cache
from lab.conformance import report
from lab.conformance.harness import Subject
from lab.conformance.rules import RULES
from lab.conformance.runner import ROLES, Verdict, play_all
from lab.vllm_loop import RUNNERS

# A check takes longer only if a connector blocks where Python cannot interrupt it.
_STUCK_S = 300.0


def class_at(path: str) -> tuple[str, str]:
    """Split MODULE:CLASS, and check that the class exists."""
    module, _, name = path.partition(":")
    try:
        getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as missing:
        raise argparse.ArgumentTypeError(f"{path}: {missing}") from missing
    return module, name


def json_object(text: str) -> dict[str, Any]:
    """Read the connector's options."""
    try:
        read = json.loads(text)
    except ValueError as wrong:
        raise argparse.ArgumentTypeError(f"not JSON: {wrong}") from wrong
    if not isinstance(read, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return read


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lab.conformance",
        description="Play vLLM's calls, with faults, against an encoder-cache connector.",
    )
    parser.add_argument("--connector", required=True, type=class_at, metavar="MODULE:CLASS")
    parser.add_argument(
        "--extra-config",
        type=json_object,
        default={},
        metavar="JSON",
        help="its options; {folder} becomes the folder that all engines share, {host} one per host",
    )
    parser.add_argument("--runner", choices=(*RUNNERS, "both"), default="both")
    parser.add_argument(
        "--roles",
        choices=(*ROLES, "all"),
        default="all",
        help="apart: ec_producer and ec_consumer; both: each engine is ec_both",
    )
    parser.add_argument(
        "--rule", action="append", choices=sorted(RULES), metavar="NAME", help="play only this rule"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=15.0,
        metavar="S",
        help="after this time a request counts as hung",
    )
    parser.add_argument("--model", type=Path, help="default: a small Qwen2.5-VL that is generated")
    parser.add_argument("--report", type=Path, metavar="FILE.md", help="write a page")
    return parser


def _give_up_later() -> None:
    """End the program with a traceback, unless this is called again in time."""
    assert sys.__stderr__ is not None
    faulthandler.dump_traceback_later(_STUCK_S, exit=True, file=sys.__stderr__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ec-conformance-model-") as scratch:
        model = options.model or model_cache.model(Path(scratch))
        module, name = options.connector
        subject = Subject(module, name, options.extra_config, model, options.patience)
        results = []
        _give_up_later()
        for result in play_all(
            subject,
            options.rule or RULES,
            RUNNERS if options.runner == "both" else [options.runner],
            ROLES if options.roles == "all" else [options.roles],
        ):
            _give_up_later()
            results.append(result)
            print(report.line(result), flush=True)
        faulthandler.cancel_dump_traceback_later()
    print(report.summary(results))
    if options.report is not None:
        options.report.write_text(report.page(name, vllm_version, results))
    return any(each.verdict is Verdict.BROKEN for each in results)


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # vLLM's log of each engine would hide the results
    sys.exit(main())
