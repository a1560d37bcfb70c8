# SPDX-License-Identifier: Apache-2.0
"""Write docs/config.md from the types that parse the options, so that the page cannot drift.

    python scripts/write_config_docs.py [--check]

With `--check` nothing is written: exit status 1 if the page is not what would be written.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as types

from ecshare.encoder.config import EncoderConfig
from ecshare.router.options.arguments import settings
from ecshare.router.options.config import RouterConfig
from ecshare.store.attribute_docs import attribute_docs
from kvshare.config import KVConfig, TierConfig

PAGE = Path(__file__).parents[1] / "docs" / "config.md"

CONNECTORS = """\
# Options

*Written by `make docs` from the types that parse the options; a test fails when they differ.*

## Connectors

Each connector takes a JSON object of options inside the object that configures it:

```
--ec-transfer-config '{"ec_connector": "ECShareConnector", "ec_role": "ec_both",
                       "ec_connector_extra_config": {"url": "s3://bucket/prefix"}}'
--kv-transfer-config '{"kv_connector": "KVShareConnector", "kv_role": "kv_both",
                       "kv_connector_extra_config": {"url": "s3://bucket/prefix"}}'
```

| role | what the engine does |
|---|---|
| `ec_producer` | encodes images that are not stored yet and stores them; has no language model |
| `ec_consumer` | loads embeddings; encodes missing ones if the request contains the image |
| `ec_both` | both |
| `kv_producer` | stores the KV blocks that it computes |
| `kv_consumer` | loads KV blocks |
| `kv_both` | both |

If the package is not installed, but is on `PYTHONPATH`, also give the modules of the classes:
`"ec_connector_module_path": "ecshare.connector"` and
`"kv_connector_module_path": "kvshare.connector"`.

An engine with an unknown option, or an option of the wrong type, does not start. A sentence names
the option.
"""

SECRETS = """
### Secrets

vLLM logs the arguments that an engine is given ("non-default args"), and the process list shows
them to every user of the host. So do not write secrets into the JSON above:

| written as | meaning |
|---|---|
| nothing | the usual credentials: `AWS_ACCESS_KEY_ID`, `AWS_PROFILE`, roles, ...; this is best |
| `env:NAME` | the environment variable `NAME` of each process of the engine |
| `file:/path` | the text of that file, without blanks at its ends; let only this user read it |

`env:` and `file:` can be used for any text in `storage_options`, at any depth, and for
`integrity_key`:

```
{"url": "s3://bucket/prefix", "integrity_key": "file:/run/secrets/ecshare",
 "storage_options": {"key": "env:OUR_KEY_ID", "secret": "env:OUR_SECRET",
                     "endpoint_url": "env:S3_URL_WITH_PASSWORD"}}
```

`url` cannot be a reference: write the password of an `sftp://`, `ftp://` or `smb://` store into
`storage_options.password`. An engine, and `ecshare doctor`, warn of each secret in the
configuration itself: of texts whose option is called a key, token, password or the like, and of
logins in urls. They name the option, never the value. Their own messages show `***` in place of
secrets, logins in urls and signatures.
"""

TIER = """
## Tier for vLLM's own offloading

Experimental, as is vLLM's interface: an entry of `secondary_tiers` of its OffloadingConnector.

```
--kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
                       "kv_connector_extra_config": {
                         "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8000000000,
                         "secondary_tiers": [{
                           "type": "KVShareTier", "module_path": "kvshare.tier",
                           "url": "s3://bucket/prefix", "epoch": "qwen-7b bf16"}]}}'
```

Besides `type` and `module_path` it takes the options of both connectors, except `max_bytes`,
`preload_bytes`, `save_after`, `ttl_hours`, and these:
"""

ROUTER = """
## Router

Arguments of `ecshare router`, which is also `python -m ecshare.router`. Each may instead be in the
environment (`ECSHARE_ROUTER_OPTION_MAX_ITEMS=8`; several values are separated by blanks), or in the
TOML file of `--config FILE` (`max-items = 8`, `decoder = ["http://decode.example:8003"]`,
`access-log = true`). The command line counts before the environment, and that before the file. An
unknown name is refused.
"""


def page() -> str:
    """Return the whole page."""
    tables = [CONNECTORS, *connector_table(), SECRETS, TIER, *tier_table(), ROUTER, *router_table()]
    return "\n".join([*tables, ""])


def connector_table() -> Iterator[str]:
    """Yield one row per option, in the order of the types; shared ones first."""
    taken: dict[str, list[str]] = {}
    fields: dict[str, tuple[types.Field, str]] = {}
    for name, config in (("ECShareConnector", EncoderConfig), ("KVShareConnector", KVConfig)):
        purposes = attribute_docs(config)
        described = types.type_info(config)
        assert isinstance(described, types.StructType)
        for field in described.fields:
            taken.setdefault(field.encode_name, []).append(name)
            fields[field.encode_name] = field, purposes[field.encode_name]
    yield "| option | type | default | meaning | connector |"
    yield "|---|---|---|---|---|"
    for option in sorted(fields, key=lambda name: -len(taken[name])):
        field, purpose = fields[option]
        takers = "both" if len(taken[option]) > 1 else taken[option][0]
        yield row(f"`{option}`", type_words(field.type), default_words(field), purpose, takers)


def tier_table() -> Iterator[str]:
    """Yield one row per option that only a tier has, or that differs for a tier."""
    purposes = attribute_docs(TierConfig)
    described = types.type_info(TierConfig)
    assert isinstance(described, types.StructType)
    yield "| option | type | default | meaning |"
    yield "|---|---|---|---|"
    for field in described.fields:
        if field.name in TierConfig.__annotations__:
            purpose = purposes[field.encode_name]
            yield row(f"`{field.name}`", type_words(field.type), default_words(field), purpose)


def router_table() -> Iterator[str]:
    """Yield one row per argument of the router's command line."""
    yield "| argument | default | meaning |"
    yield "|---|---|---|"
    docs = attribute_docs(RouterConfig)
    for setting in settings().values():
        metavar = setting.option.metavar or "TEXT"
        value = "" if setting.is_switch else f" {metavar}"
        shown = setting.shown_default
        is_value = not setting.option.if_none and shown not in ("none", "off")
        default = f"`{shown}`" if is_value else shown
        yield row(f"`{setting.option.flag}{value}`", default, docs[setting.field])


def type_words(described: types.Type) -> str:
    """Return a field's type and bounds, in words."""
    match described:
        case types.UnionType():
            known = [each for each in described.types if not isinstance(each, types.NoneType)]
            return " or ".join(type_words(each) for each in known)
        case types.FloatType() | types.IntType():
            word = "whole number" if isinstance(described, types.IntType) else "number"
            bounds = [
                f"{words} {bound:g}"
                for words, bound in (
                    ("above", described.gt),
                    ("at least", described.ge),
                    ("below", described.lt),
                    ("at most", described.le),
                )
                if bound is not None
            ]
            return ", ".join([word, *bounds])
        case types.StrType():
            limit = described.max_length
            return "text" if limit is None else f"text, at most {limit} characters"
        case types.BoolType():
            return "true or false"
        case types.DictType():
            return "object"
        case types.LiteralType():
            return " or ".join(f"`{value}`" for value in described.values)
    raise TypeError(f"say in write_config_docs.py how to name {described}")


def default_words(field: types.Field) -> str:
    """Return a field's default; sizes in the largest unit that fits."""
    if field.required:
        return "required"
    value: Any = field.default
    if value is msgspec.NODEFAULT:
        value = field.default_factory()
    if value is None:
        return "none"
    if field.name.endswith("_bytes"):
        for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
            if value % size == 0:
                return f"`{value}` ({value // size} {unit})"
    return f"`{msgspec.json.encode(value).decode()}`"


def row(*cells: str) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    if not parser.parse_args().check:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        print("docs/config.md is not up to date: run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
