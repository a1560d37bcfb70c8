# SPDX-License-Identifier: Apache-2.0
"""Finds the connectors of this project in the options of an engine: the doctor examines them."""

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import fields

from ecshare.doctor.findings import printable
from ecshare.encoder.config import EncoderConfig
from ecshare.store.config import StoreConfig, parse, suggestion
from ecshare.store.errors import ConfigError
from kvshare.config import KVConfig, TierConfig, parse_tier

OFFLOADING, MULTI = "OffloadingConnector", "MultiConnector"
_POLICY = "kv_load_failure_policy"

_CONFIGS: dict[str, type[StoreConfig]] = {
    "ECShareConnector": EncoderConfig,
    "KVShareConnector": KVConfig,
    "KVShareTier": TierConfig,
}
_PLACES = {
    "ECShareConnector": "as ec_connector in --ec-transfer-config",
    "KVShareConnector": "as kv_connector in --kv-transfer-config",
    "KVShareTier": f"among the secondary_tiers of vLLM's {OFFLOADING}",
}
_KINDS = {"ec": "ECShareConnector", "kv": "KVShareConnector"}
_MODULES = {
    "ECShareConnector": "ecshare.connector",
    "KVShareConnector": "kvshare.connector",
    "KVShareTier": "kvshare.tier",
}

# The options of a tier that vLLM itself reads.
_TIER_OPTIONS_OF_VLLM = {"type", "module_path", "backpressure"}


class Target(NamedTuple):
    """A connector or tier of this project, whose store is to be examined."""

    config: StoreConfig
    path: str
    """Where the user wrote its options: "kv_connector_extra_config.connectors[1]..."."""


class ForeignConnector(NamedTuple):
    """A connector or tier of another project."""

    path: str
    name: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.name!r} is not ours{self.hint}"


class Conflict(NamedTuple):
    """An option of vLLM that does not suit a connector of this project."""

    path: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path}: {self.advice}"


Remark = ForeignConnector | Conflict
"""A remark on options other than those of the targets."""


def read_argument(text: str) -> tuple[list[Target], list[Remark]]:
    """Return the targets that `text` names, at least one, and remarks on the rest of it.

    `text`: a url; options of a connector or a tier; the JSON of --ec-transfer-config or of
    --kv-transfer-config; or "@" and a file with one of them.

    Raises:
        ConfigError: it is not valid, or names no connector of ours; names the JSON path.
    """
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError, ValueError) as exc:
            raise ConfigError(
                f"argument store: {printable(text[1:])} cannot be read: {printable(str(exc))}"
            ) from exc
    if not text.startswith("{") and '"' in text:
        raise ConfigError("argument store: neither a url nor a JSON object, which begins with {")
    if not text.startswith("{"):
        return [Target(parse(StoreConfig, {"url": text}, "options"), "options")], []
    try:
        given: dict[str, Any] = json.loads(text)
        json.dumps(given, ensure_ascii=False).encode()  # a lone surrogate is not text
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"argument store: not JSON ({exc})") from exc
    found = list(_transfer_config(given, ""))
    targets = [each for each in found if isinstance(each, Target)]
    remarks = [each for each in found if not isinstance(each, Target)]
    if remarks and not targets:
        raise ConfigError(
            f"{'; '.join(map(str, remarks))}. The doctor examines the stores of "
            f"{', '.join(_CONFIGS)}"
        )
    return targets or [_standalone(given)], remarks


def _transfer_config(given: Mapping[str, Any], above: str) -> Iterator[Target | Remark]:
    """Yield what `given`, at the JSON path `above`, configures.

    It yields nothing if `given` is no transfer config.
    """
    for whole in (
        "ec_transfer_config",
        "kv_transfer_config",
    ):  # as in vLLM's VllmConfig
        if whole in given:
            if not isinstance(given[whole], Mapping):
                raise ConfigError(f"{above}{whole}: expected an object of options")
            yield from _transfer_config(given[whole], f"{above}{whole}.")
    for kind, default in _KINDS.items():
        name_field, extra_field = f"{kind}_connector", f"{kind}_connector_extra_config"
        if name_field not in given and extra_field not in given:
            continue
        name, extra = given.get(name_field, default), given.get(extra_field, {})
        path, module = f"{above}{extra_field}", given.get(f"{name_field}_module_path")
        if kind == "kv" and name == MULTI:
            children = list(_children(extra, path))
            # vLLM reads only the outermost policy.
            yield from (each for each in children if not isinstance(each, Conflict))
            yield from _policy_conflict(given, above, children)
            yield from _second_conflict(children, path)
        elif kind == "kv" and name == OFFLOADING:
            yield from _tiers(extra, path, f"{above}{name_field}")
        elif name == default and module in (None, "", _MODULES[default]):
            yield Target(parse(_CONFIGS[default], extra, path), path)
        else:
            yield _foreign(name, module, f"{above}{name_field}")


def _policy_conflict(
    given: Mapping[str, Any], above: str, children: Iterable[Target | Remark]
) -> Iterator[Conflict]:
    """Yield a conflict if a MultiConnector with a child of ours fails requests that lose blocks.

    KVShareConnector sets the policy itself, but below a MultiConnector it sets only a copy.
    """
    ours = any(isinstance(each, Target) and type(each.config) is KVConfig for each in children)
    if ours and given.get(_POLICY) != "recompute":
        yield Conflict(
            f"{above}{_POLICY}",
            f'write "recompute" beside {MULTI}: with vLLM\'s default, "fail", a request fails when '
            "a block of its that was found is lost before it is loaded",
        )


def _second_conflict(children: Iterable[Target | Remark], path: str) -> Iterator[Conflict]:
    """Yield a conflict if two children are ours: the engine would not start."""
    if sum(isinstance(each, Target) and type(each.config) is KVConfig for each in children) > 1:
        yield Conflict(
            f"{path}.connectors",
            "an engine can have one KVShareConnector; leave the others out. Its host cache is the "
            "near tier before its store: host_cache_dir, host_cache_bytes",
        )


def _children(extra: Any, path: str) -> Iterator[Target | Remark]:
    for place, child in _objects(extra, path, "connectors", f"{MULTI} joins others: list them"):
        found = list(_transfer_config(child, f"{place}."))
        if not found:
            raise ConfigError(f"{place}.kv_connector: missing, and it has no default")
        yield from found


def _tiers(extra: Any, path: str, name_path: str) -> Iterator[Target | Remark]:
    if isinstance(extra, Mapping) and "secondary_tiers" not in extra:
        hint = ", and has no KVShareTier among its secondary_tiers"
        yield ForeignConnector(name_path, OFFLOADING, hint)
        return
    advice = f"list the tiers of {OFFLOADING}"
    tiers = list(_objects(extra, path, "secondary_tiers", advice))
    if extra.get("spec_name", "CPUOffloadingSpec") == "CPUOffloadingSpec":
        raise ConfigError(
            f"{path}.spec_name: vLLM's default takes no secondary_tiers; "
            "write TieringOffloadingSpec"
        )
    for place, tier in tiers:
        name, module = tier.get("type"), tier.get("module_path")
        if name != "KVShareTier" or module not in (None, _MODULES[name]):
            yield _foreign(name, module, f"{place}.type")
        elif module is None:
            raise ConfigError(
                f"{place}.module_path: missing; vLLM finds {name} in {_MODULES[name]} only"
            )
        else:
            yield _tier(tier, place)


def _tier(tier: Mapping[str, Any], path: str) -> Target:
    options = {name: value for name, value in tier.items() if name not in _TIER_OPTIONS_OF_VLLM}
    return Target(parse_tier(options, path), path)


def _objects(
    extra: Any, path: str, name: str, advice: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield path and value of each entry of the list `name` in the options `extra`."""
    if not isinstance(extra, Mapping):
        raise ConfigError(f"{path}: expected an object of options")
    listed = extra.get(name)
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{path}.{name}: expected a list, at least one entry long; {advice}")
    for n, entry in enumerate(listed):
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{path}.{name}[{n}]: expected an object of options")
        yield f"{path}.{name}[{n}]", entry


def _foreign(name: Any, module: Any, path: str) -> ForeignConnector:
    if not isinstance(name, str):
        raise ConfigError(f"{path}: expected a name, such as {' or '.join(_CONFIGS)}")
    if name in _PLACES and module in (None, "", _MODULES[name]):
        raise ConfigError(f"{path}: {name} does not go here, but {_PLACES[name]}")
    if module:
        return ForeignConnector(path, name, f", it comes from {module}")
    near = difflib.get_close_matches(name, _CONFIGS, n=1, cutoff=0.85)  # vLLM's are no misspelling
    return ForeignConnector(path, name, f"; perhaps {near[0]} is meant" if near else "")


def _standalone(given: Mapping[str, Any]) -> Target:
    """Parse options without a connector's name, as those of the first connector that has all."""
    path = "options"
    if "type" in given:
        return _tier(given, path)
    known = {name: {f.encode_name for f in fields(config)} for name, config in _CONFIGS.items()}
    for name, config in _CONFIGS.items():
        if known[name].issuperset(given):
            if config is TierConfig:
                return _tier(given, path)
            return Target(parse(config, given, path), path)
    every = set().union(*known.values())
    for option in given:
        if option not in every:
            raise ConfigError(
                f"{path}.{printable(str(option))}: unknown option; "
                f"{suggestion(str(option), sorted(every))}"
            )
    owners = [
        f"{option} is an option of {name}"
        for name, options in known.items()
        for option in sorted(options & set(given))
        if sum(option in each for each in known.values()) == 1
    ]
    raise ConfigError(f"{path}: {', '.join(owners)}; give the options of one of them")
