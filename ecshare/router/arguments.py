# SPDX-License-Identifier: Apache-2.0
"""From the router's command line to its `RouterConfig`."""

import argparse
from collections.abc import Sequence
from typing import Any

from ecshare.router.config import AdminConfig, RouterConfig
from ecshare.router.engine_urls import repeated_url
from ecshare.router.engines import Stage
from ecshare.router.fleet import read_engines
from ecshare.router.options import make_parser
from ecshare.router.roster import Urls
from ecshare.store.errors import ConfigError

_ENGINES = {
    "encoder": Stage.ENCODE,
    "prefiller": Stage.PREFILL,
    "decoder": Stage.DECODE,
}


def parse_arguments(
    arguments: Sequence[str] | None = None, prog: str = "python -m ecshare.router"
) -> RouterConfig:
    """Parse the command line. Exits with status 2 and one sentence if it is wrong."""
    parser = make_parser(prog)
    options = parser.parse_args(arguments)
    try:
        urls = _engine_urls(options)
        admin = _admin(options)
    except ConfigError as exc:
        parser.error(str(exc))
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(options).items()
        if name in RouterConfig.__struct_fields__
    }
    given |= {f"{name}s": urls[stage] for name, stage in _ENGINES.items()}
    return RouterConfig(**given, admin=admin)


def _given(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the engines of --encoder, --prefiller and --decoder."""
    return {name: getattr(options, f"{name}s") for name in _ENGINES}


def _duplicate_url(options: argparse.Namespace) -> str | None:
    """Return an error message if an engine is given twice, else None."""
    twice = repeated_url(_given(options))
    return twice and (
        f"argument --{twice.group}: {twice.url} is already given as --{twice.earlier_group}; name "
        "each engine once, and leave out the stages that have none of their own"
    )


def _from_file(options: argparse.Namespace) -> Urls:
    """Return the engines of --engines.

    Raises:
        ConfigError: the file is not usable, or other engines are given besides.
    """
    if any(_given(options).values()):
        raise ConfigError("argument --engines: the file names all engines; give no others")
    try:
        return read_engines(options.engines_file).urls
    except ConfigError as exc:
        raise ConfigError(f"argument --engines: {exc}") from exc


def _engine_urls(options: argparse.Namespace) -> Urls:
    """Return the engines of each stage.

    Raises:
        ConfigError: they are not usable; says why.
    """
    if options.engines_file is not None:
        return _from_file(options)
    given = _given(options)
    if not given["decoder"]:
        raise ConfigError("the following arguments are required: --decoder, or --engines")
    if twice := _duplicate_url(options):
        raise ConfigError(twice)
    return {stage: tuple(given[name]) for name, stage in _ENGINES.items()}


def _admin(options: argparse.Namespace) -> AdminConfig | None:
    """Return the operator's port, None if there is none.

    Raises:
        ConfigError: it would have no key, or the key no port.
    """
    if options.admin_port is None:
        if options.admin_key is not None:
            raise ConfigError("argument --admin-key: it is for --admin-port, which is not given")
        return None
    if options.admin_key is None:
        raise ConfigError("argument --admin-port: it needs --admin-key env:NAME or file:PATH")
    return AdminConfig(options.admin_host, options.admin_port, options.admin_key)
