# SPDX-License-Identifier: Apache-2.0
"""Finds the connectors of this project in the options of an engine: the doctor examines them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import fields

from ecshare.doctor.findings import printable
from ecshare.encoder.config import EncoderConfig
from ecshare.store.config import StoreConfig, parse
from ecshare.store.errors import ConfigError
from kvshare.config import KVConfig, TierConfig, parse_tier

OFFLOADING, MULTI = "OffloadingConnector", "MultiConnector"
_POLICY = "kv_load_failure_policy"

_CONFIGS: dict[str, type[StoreConfig]] = {
    "KVShareConnector": KVConfig,
    "ECShareConnector": EncoderConfig,
    "KVShareTier": TierConfig,
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


class Remark(NamedTuple):
    """A remark on options other than those of the targets."""

    path: str
    text: str
    is_problem: bool = False
    """True: an option of vLLM does not suit a connector of this project. False: a connector is of
    another project."""

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


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
    for kind, ours in _KINDS.items():
        name_field, extra_field = f"{kind}_connector", f"{kind}_connector_extra_config"
        if name_field not in given and extra_field not in given:
            continue
        name, extra = given.get(name_field, ours), given.get(extra_field, {})
        path, module = f"{above}{extra_field}", given.get(f"{name_field}_module_path")
        if kind == "kv" and name == MULTI:
            yield from _children(given, extra, path, above)
        elif kind == "kv" and name == OFFLOADING:
            yield from _tiers(extra, path, f"{above}{name_field}")
        elif _is_ours(name, module, ours):
            yield Target(parse(_CONFIGS[ours], extra, path), path)
        else:
            yield _foreign(name, module, ours, f"{above}{name_field}")


def _children(
    given: Mapping[str, Any], extra: Any, path: str, above: str
) -> Iterator[Target | Remark]:
    """Yield what the children of a MultiConnector configure.

    It fails requests that lose blocks, unless its policy is "recompute". KVShareConnector sets the
    policy itself, but below a MultiConnector it sets only a copy.
    """
    found: list[Target | Remark] = []
    for place, child in _objects(extra, path, "connectors", f"{MULTI} joins others: list them"):
        inner = list(_transfer_config(child, f"{place}."))
        if not inner:
            raise ConfigError(f"{place}.kv_connector: missing, and it has no default")
        found += inner
    # vLLM reads only the outermost policy.
    yield from (each for each in found if isinstance(each, Target) or not each.is_problem)
    ours = any(isinstance(each, Target) and type(each.config) is KVConfig for each in found)
    if ours and given.get(_POLICY) != "recompute":
        yield Remark(
            f"{above}{_POLICY}",
            f'write "recompute" beside {MULTI}: with vLLM\'s default, "fail", a request fails when '
            "a block of its that was found is lost before it is loaded",
            is_problem=True,
        )


def _tiers(extra: Any, path: str, name_path: str) -> Iterator[Target | Remark]:
    if isinstance(extra, Mapping) and "secondary_tiers" not in extra:
        yield Remark(name_path, f"{OFFLOADING} has no KVShareTier among its secondary_tiers")
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
        if _is_ours(name, module, "KVShareTier"):
            yield _tier(tier, place)
        else:
            yield _foreign(name, module, "KVShareTier", f"{place}.type")


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


def _is_ours(name: Any, module: Any, ours: str) -> bool:
    return name == ours and module in (None, "", _MODULES[ours])


def _foreign(name: Any, module: Any, ours: str, path: str) -> Remark:
    return Remark(path, f"{name!r}{f' of {module}' if module else ''} is not our {ours}")


def _standalone(given: Mapping[str, Any]) -> Target:
    """Parse options without a connector's name, as those of the connector that has the most."""
    path = "options"

    def num_known(config: type[StoreConfig]) -> int:
        return len(given.keys() & {each.encode_name for each in fields(config)})

    config = max(_CONFIGS.values(), key=num_known)
    if "type" in given or config is TierConfig:
        return _tier(given, path)
    return Target(parse(config, given, path), path)
