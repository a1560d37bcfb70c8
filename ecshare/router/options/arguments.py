# SPDX-License-Identifier: Apache-2.0
"""From what users give to a `RouterConfig`: the command line, the environment and a file.

Of an option that is given several times, the command line counts before the environment, and that
before the file.
"""

import argparse
import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from ecshare import __version__
from ecshare.router.options.config import Option, RouterConfig, share_of
from ecshare.router.options.engines import check_distinct, read_engines, read_file
from ecshare.router.options.values import MIB, mebibytes
from ecshare.store.attribute_docs import attribute_docs
from ecshare.store.errors import ConfigError

# Not shorter: for a service that is called ecshare-router, Kubernetes sets ECSHARE_ROUTER_PORT.
VARIABLES = "ECSHARE_ROUTER_OPTION_"
_CONFIG = "--config"
_ENGINES = ("encoder", "prefiller", "decoder")
"""The names of the options for engines, in the order of the stages."""
_SWITCHED = {"true": True, "1": True, "false": False, "0": False}

OptionTexts = tuple[str, str, Sequence[str]]
"""How error messages name an option, its name, and its values as text."""


class Setting(NamedTuple):
    """A field of `RouterConfig`, and how users give it."""

    field: str
    kind: Any
    option: Option
    default: Any

    @property
    def is_switch(self) -> bool:
        """Return whether the field is a boolean."""
        return self.kind is bool

    @property
    def may_repeat(self) -> bool:
        """Return whether the field has several values."""
        return get_origin(self.kind) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        """Return all values that the field may have; none if they are not a few."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def shown_default(self) -> str:
        """Return the default in words."""
        if self.option.if_none:
            return self.option.if_none
        if self.option.read is mebibytes:
            return f"{self.default / MIB:g}"
        if self.is_switch:
            return "off"
        if self.default in (None, "", ()):
            return "none"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def value(self, given: Sequence[str]) -> Any:
        """Return the field's value.

        Raises:
            ValueError: what was given is wrong; says why.
        """
        if self.may_repeat:
            return tuple(map(self.option.read, given))
        if len(given) != 1:
            raise ValueError("it can be given once only")
        (text,) = given
        if self.is_switch:
            if text.lower() not in _SWITCHED:
                raise ValueError(f"{text!r} must be true or false")
            return _SWITCHED[text.lower()]
        if self.choices and text not in self.choices:
            raise ValueError(f"{text!r} must be one of {', '.join(self.choices)}")
        return self.option.read(text)


@cache
def settings() -> Mapping[str, Setting]:
    """Return all settings, by the names of their flags without dashes in front."""
    hints = get_type_hints(RouterConfig, include_extras=True)
    found = {}
    for field in msgspec.structs.fields(RouterConfig):
        kind, option = get_args(hints[field.name])
        found[option.flag[2:]] = Setting(field.name, kind, option, field.default)
    return found


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line. Its result has the options that are given, as text."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Route completions over encode, prefill and decode engines.",
        epilog=f"Each option may also be in the environment, such as {VARIABLES}MAX_ITEMS=8.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"ecshare {__version__}", help="print the version"
    )
    parser.add_argument(
        _CONFIG,
        metavar="FILE",
        type=Path,
        help="A TOML file of options, named as here without the dashes in front; several values "
        "of one option are a list. What is given here or in the environment counts more. "
        "(default: none)",
    )
    docs = attribute_docs(RouterConfig)
    for name, setting in settings().items():
        about = f"{docs[setting.field]} (default: {setting.shown_default})"
        how: dict[str, Any] = {"dest": name, "nargs": 1, "help": about.replace("%", "%%")}
        if setting.is_switch:
            how |= {"action": "store_const", "const": ["true"]}
            del how["nargs"]
        else:
            choices = ",".join(setting.choices)
            how["metavar"] = setting.option.metavar or (choices and f"{{{choices}}}")
        if setting.may_repeat:
            how["action"] = "extend"
        parser.add_argument(setting.option.flag, **how)
    return parser


def parse_arguments(
    arguments: Sequence[str] | None = None,
    prog: str = "python -m ecshare.router",
    environment: Mapping[str, str] = os.environ,
) -> RouterConfig:
    """Return the options. Exits with status 2 and one sentence if they are wrong."""
    parser = make_parser(prog)
    given = vars(parser.parse_args(arguments))
    try:
        path = given.pop("config", None)
        values = {} if path is None else dict(map(_value, _in_file(path)))
        values |= map(_value, _in_environment(environment))
        values |= (_value((f"argument --{name}", name, texts)) for name, texts in given.items())
        config = RouterConfig(**values | _engine_urls(values))
        share_of(config)  # says what cannot be divided
    except ConfigError as exc:
        parser.error(str(exc))
    return config


def _in_file(path: Path) -> Iterator[OptionTexts]:
    """Yield what the file gives.

    Raises:
        ConfigError: it cannot be used; names the option at fault.
    """
    try:
        options = tomllib.loads(read_file(path).decode())
    except ConfigError as exc:
        raise ConfigError(f"argument {_CONFIG}: {exc}") from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"argument {_CONFIG}: {path} is no TOML: {exc}") from exc
    for name, value in options.items():
        where = f"{path}: {name}"
        listed = value if isinstance(value, list) else [value]
        if not all(isinstance(each, str | int | float) for each in listed):
            raise ConfigError(
                f"{where}: it must be a text, a number, true or false, or a list of them"
            )
        texts = [str(each).lower() if isinstance(each, bool) else str(each) for each in listed]
        yield where, name, texts


def _in_environment(environment: Mapping[str, str]) -> Iterator[OptionTexts]:
    for variable, text in environment.items():
        if variable.startswith(VARIABLES):
            name = variable.removeprefix(VARIABLES).lower().replace("_", "-")
            several = name in settings() and settings()[name].may_repeat
            yield variable, name, text.split() if several else [text]


def _value(given: OptionTexts) -> tuple[str, Any]:
    """Return a field and its value.

    Raises:
        ConfigError: there is no such option, or the value is wrong.
    """
    where, name, texts = given
    setting = settings().get(name)
    if setting is None:
        (*alike,) = difflib.get_close_matches(name, settings(), 1)
        hint = f"; did you mean {alike[0]}?" if alike else ""
        raise ConfigError(f"{where}: the router has no option {name!r}{hint}")
    try:
        return setting.field, setting.value(texts)
    except ValueError as exc:
        raise ConfigError(f"{where}: {exc}") from exc


def _engine_urls(values: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the engines of each stage, by field.

    Raises:
        ConfigError: they are not usable; says why.
    """
    given = {name: values.get(f"{name}s", ()) for name in _ENGINES}
    if (path := values.get("engines_file")) is not None:
        if any(given.values()):
            raise ConfigError("argument --engines: the file names all engines; give no others")
        try:
            given = dict(zip(_ENGINES, read_engines(path).urls.values(), strict=True))
        except ConfigError as exc:
            raise ConfigError(f"argument --engines: {exc}") from exc
    elif not given["decoder"]:
        raise ConfigError("the following arguments are required: --decoder, or --engines")
    try:
        check_distinct({f"--{name}": urls for name, urls in given.items()})
    except ValueError as exc:
        raise ConfigError(f"argument {exc}") from exc
    return {f"{name}s": urls for name, urls in given.items()}
