# SPDX-License-Identifier: Apache-2.0
"""Finds this project's connectors in the options that an engine is given."""

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import fields

from ecshare.config import EncoderConfig
from ecshare.doctor.findings import printable
from ecshare.store.config import StoreConfig, parse, suggestion
from ecshare.store.errors import ConfigError
from kvshare.config import KVConfig, TierConfig, parse_tier

OFFLOADING, MULTI = "OffloadingConnector", "MultiConnector"

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

# By vLLM's registries, 0.30 to 0.32.
COMES_WITH_VLLM = {
    "ECCPUConnector", "ECExampleConnector", "ECMooncakeConnector",
    "DecodeBenchConnector", "ExampleConnector", "ExampleHiddenStatesConnector",
    "FlexKVConnectorV1", "HF3FSKVConnector", "HiSparseConnector", "LMCacheConnectorV1",
    "LMCacheMPConnector", "MoRIIOConnector", "MooncakeConnector", "MooncakeStoreConnector",
    "NixlConnector", "NixlPullConnector", "NixlPushConnector", "SimpleCPUOffloadConnector",
    OFFLOADING, MULTI,
}  # fmt: skip
VLLM_TIERS = {"example", "fs", "kvcr", "obj", "p2p"}
# What vLLM reads of a tier's options itself.
_TIER_FRAME = {"type", "module_path", "backpressure"}


class Subject(NamedTuple):
    """A connector, or a tier, of this project, whose store is to be examined."""

    config: StoreConfig
    path: str
    """Where the user wrote its options: "kv_connector_extra_config.connectors[1]..."."""


class Stranger(NamedTuple):
    """A connector or a tier of somebody else."""

    path: str
    name: str
    whose: str

    def __str__(self) -> str:
        return f"{self.path}: {self.name!r} is not ours, {self.whose}"


def read_argument(text: str) -> tuple[list[Subject], list[Stranger]]:
    """Return whose stores `text` names: at least one subject, and what else stands beside it.

    `text`: a url; options of a connector or a tier; the JSON of --ec-transfer-config or of
    --kv-transfer-config; or "@" and a file with one of them.

    Raises:
        ConfigError: it makes no sense, or names no connector of ours; names the JSON path.
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
        return [Subject(parse(StoreConfig, {"url": text}, "options"), "options")], []
    try:
        said: dict[str, Any] = json.loads(text)
        json.dumps(said, ensure_ascii=False).encode()  # half a character is no text
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"argument store: not JSON ({exc})") from exc
    found = list(_transfer_config(said, ""))
    subjects = [each for each in found if isinstance(each, Subject)]
    strangers = [each for each in found if isinstance(each, Stranger)]
    if strangers and not subjects:
        raise ConfigError(
            f"{'; '.join(map(str, strangers))}. The doctor examines the stores of "
            f"{', '.join(_CONFIGS)}"
        )
    return subjects or [_plain(said)], strangers


def _transfer_config(said: Mapping[str, Any], above: str) -> Iterator[Subject | Stranger]:
    """Yield what `said`, at the path `above`, configures. Nothing: it is no transfer config."""
    for whole in ("ec_transfer_config", "kv_transfer_config"):  # both, as vLLM's own options hold
        if whole in said:
            if not isinstance(said[whole], Mapping):
                raise ConfigError(f"{above}{whole}: expected an object of options")
            yield from _transfer_config(said[whole], f"{above}{whole}.")
    for kind, default in _KINDS.items():
        name_field, extra_field = f"{kind}_connector", f"{kind}_connector_extra_config"
        if name_field not in said and extra_field not in said:
            continue
        name, extra = said.get(name_field, default), said.get(extra_field, {})
        path, module = f"{above}{extra_field}", said.get(f"{name_field}_module_path")
        if kind == "kv" and name == MULTI:
            yield from _children(extra, path)
        elif kind == "kv" and name == OFFLOADING:
            yield from _tiers(extra, path, f"{above}{name_field}")
        elif name == default and module in (None, "", _MODULES[default]):
            yield Subject(parse(_CONFIGS[default], extra, path), path)
        else:
            yield _stranger(name, module, f"{above}{name_field}", COMES_WITH_VLLM)


def _children(extra: Any, path: str) -> Iterator[Subject | Stranger]:
    for place, child in _objects(extra, path, "connectors", f"{MULTI} joins others: list them"):
        found = list(_transfer_config(child, f"{place}."))
        if not found:
            raise ConfigError(f"{place}.kv_connector: missing, and it has no default")
        yield from found


def _tiers(extra: Any, path: str, name_path: str) -> Iterator[Subject | Stranger]:
    if isinstance(extra, Mapping) and "secondary_tiers" not in extra:
        whose = "it comes with vLLM, and has no KVShareTier among its secondary_tiers"
        yield Stranger(name_path, OFFLOADING, whose)
        return
    fix = f"list the tiers of {OFFLOADING}"
    tiers = list(_objects(extra, path, "secondary_tiers", fix))
    if extra.get("spec_name", "CPUOffloadingSpec") == "CPUOffloadingSpec":
        raise ConfigError(
            f"{path}.spec_name: vLLM's default takes no secondary_tiers; "
            "write TieringOffloadingSpec"
        )
    for place, tier in tiers:
        name, module = tier.get("type"), tier.get("module_path")
        if name != "KVShareTier" or module not in (None, _MODULES[name]):
            yield _stranger(name, module, f"{place}.type", VLLM_TIERS)
        elif module is None:
            raise ConfigError(
                f"{place}.module_path: missing; vLLM finds {name} in {_MODULES[name]} only"
            )
        else:
            yield _tier(tier, place)


def _tier(tier: Mapping[str, Any], path: str) -> Subject:
    options = {name: value for name, value in tier.items() if name not in _TIER_FRAME}
    return Subject(parse_tier(options, path), path)


def _objects(extra: Any, path: str, name: str, fix: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield path and value of each entry of the list `name` in the options `extra`."""
    if not isinstance(extra, Mapping):
        raise ConfigError(f"{path}: expected an object of options")
    listed = extra.get(name)
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{path}.{name}: expected a list, at least one entry long; {fix}")
    for n, entry in enumerate(listed):
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{path}.{name}[{n}]: expected an object of options")
        yield f"{path}.{name}[{n}]", entry


def _stranger(name: Any, module: Any, path: str, of_vllm: set[str]) -> Stranger:
    if not isinstance(name, str):
        raise ConfigError(f"{path}: expected a name, such as {' or '.join(_CONFIGS)}")
    if name in _PLACES and module in (None, "", _MODULES[name]):
        raise ConfigError(f"{path}: {name} does not go here, but {_PLACES[name]}")
    if module:
        return Stranger(path, name, f"it comes from {module}")
    if name in of_vllm:
        return Stranger(path, name, "it comes with vLLM")
    near = difflib.get_close_matches(name, _CONFIGS, n=1)
    return Stranger(path, name, f"nor vLLM's; perhaps {near[0]} is meant" if near else "nor vLLM's")


def _plain(said: Mapping[str, Any]) -> Subject:
    """Read options that stand alone: those of the first of ours that has them all."""
    path = "options"
    if "type" in said:
        return _tier(said, path)
    known = {name: {f.encode_name for f in fields(config)} for name, config in _CONFIGS.items()}
    for name, config in _CONFIGS.items():
        if known[name].issuperset(said):
            if config is TierConfig:
                return _tier(said, path)
            return Subject(parse(config, said, path), path)
    every = set().union(*known.values())
    for option in said:
        if option not in every:
            raise ConfigError(
                f"{path}.{printable(str(option))}: unknown option; "
                f"{suggestion(str(option), sorted(every))}"
            )
    owners = [
        f"{option} is an option of {name}"
        for name, options in known.items()
        for option in sorted(options & set(said))
        if sum(option in each for each in known.values()) == 1
    ]
    raise ConfigError(f"{path}: {', '.join(owners)}; give the options of one of them")
