# SPDX-License-Identifier: Apache-2.0
"""`python -m ecshare`, and the command `ecshare`."""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ecshare.config import EncoderConfig
from ecshare.doctor import Level, examine
from ecshare.store.config import StoreConfig, parse
from ecshare.store.errors import ConfigError

_PATHS = {"ec": "ec_connector_extra_config", "kv": "kv_connector_extra_config"}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line. Exit status: 0 all is well, 1 a problem was found, 2 wrong usage."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        config, path = _config(options.store)
        sys.exit(asyncio.run(_doctor(config, path, options)))
    except ConfigError as exc:
        parser.error(str(exc))
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ecshare", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor",
        help="find out whether a store is well, and why engines do not share",
        description="Find out whether a store is well, and why engines do not share: try the store "
        "and this host's cache, verify stored objects, and name the facts that keep namespaces "
        "apart. Exit status: 0 all is well, 1 a problem was found, 2 wrong usage.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    doctor.add_argument(
        "store",
        help="a url; or the JSON that an engine is given as --ec-transfer-config or "
        "--kv-transfer-config; or @FILE with either",
    )
    doctor.add_argument("--read-only", action="store_true", help="store nothing, not even a probe")
    doctor.add_argument(
        "--sample", type=int, default=20, help="objects of each namespace to read and verify"
    )
    return parser


def _config(text: str) -> tuple[StoreConfig, str]:
    """Return the options that `text` means, and the path that a user knows them by."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"argument store: {text[1:]} cannot be read: {exc}") from exc
    if not text.startswith("{"):
        return parse(StoreConfig, {"url": text}, "options"), "options"
    try:
        said: dict[str, Any] = json.loads(text)
    except ValueError as exc:
        raise ConfigError(f"argument store: not JSON ({exc})") from exc
    for kind, path in _PATHS.items():
        if f"{kind}_connector" in said or path in said:
            config_type = EncoderConfig if kind == "ec" else StoreConfig
            return parse(config_type, said.get(path, {}), path), path
    return parse(EncoderConfig, said, "options"), "options"


async def _doctor(config: StoreConfig, path: str, options: argparse.Namespace) -> int:
    status = 0
    findings = examine(config, path, write=not options.read_only, sample=options.sample)
    async for topic, level, text, details in findings:
        print(f"{level.value:8}{topic}: {text}", flush=True)
        for line in details:
            print(f"{'':10}{line}")
        status |= level is Level.PROBLEM
    return status
