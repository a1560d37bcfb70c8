# SPDX-License-Identifier: Apache-2.0
"""The doctor's argument: every form of every option, and foreign connectors beside ours."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ecshare.doctor.targets import read_argument
from ecshare.encoder.config import EncoderConfig
from ecshare.store.config import StoreConfig
from ecshare.store.errors import ConfigError
from kvshare.config import KVConfig, TierConfig
from tests.ecshare.conftest import Doctor

KV_EXTRA, EC_EXTRA = "kv_connector_extra_config", "ec_connector_extra_config"
EVERY: dict[str, Any] = {
    "storage_options": {},
    "epoch": "e",
    "folder_access": "group",
    "wait_s": 1.5,
    "io_timeout_s": 2.5,
    "buffer_bytes": 3,
    "host_cache_dir": "/h",
    "host_cache_bytes": 4,
    "integrity_key": "8f1c6e0b5a9d47233be1f0a47c5d9286e3b14f7a08c2d6599a61e7f4350bd8c2",
    "accepted_integrity_key": "0b7d52a1f7e94c3c8f25c2f4d3f1a8e96b0c7d1e2f3a4b5c6d7e8f9012345678",
    "integrity_name": "first",
    "tenant": "acme",
}
BUDGET = {"max_bytes": 5, "ttl_hours": 0.5, "preload_bytes": 6}
OWN: dict[type[StoreConfig], dict[str, Any]] = {
    EncoderConfig: {**BUDGET, "save": "durable", "save_after": 2},
    KVConfig: {
        **BUDGET,
        "chunk_tokens": 512,
        "tails": "salted",
        "save_after": 2,
        "save_min_tokens": 1000,
        "save_answers": False,
        "load": "always",
        "stored_dtype": "fp8",
        "compression": "zstd",
    },
    TierConfig: {"locality": "REMOTE"},
}


def connector(name: str, kind: str = "kv", /, **extra: Any) -> dict[str, Any]:
    """Make a value for vLLM's --kv-transfer-config or --ec-transfer-config."""
    return {
        f"{kind}_connector": name,
        f"{kind}_role": f"{kind}_both",
        f"{kind}_connector_extra_config": extra,
    }


def tier(**options: Any) -> dict[str, Any]:
    return {"type": "KVShareTier", "module_path": "kvshare.tier", **options}


def offloading(*tiers: dict[str, Any]) -> dict[str, Any]:
    return connector(
        "OffloadingConnector",
        spec_name="TieringOffloadingSpec",
        cpu_bytes_to_use=8,
        secondary_tiers=list(tiers),
    )


def options_of(config: type[StoreConfig]) -> dict[str, Any]:
    options = {"url": "/x", **EVERY, **OWN[config]}
    assert set(options) == {f.encode_name for f in msgspec.structs.fields(config)}
    return options


FORMS = [
    (EncoderConfig, lambda said: said, "options"),
    (KVConfig, lambda said: said, "options"),
    (TierConfig, lambda said: said, "options"),
    (TierConfig, lambda said: tier(backpressure={}, **said), "options"),
    (EncoderConfig, lambda said: connector("ECShareConnector", "ec", **said), EC_EXTRA),
    (EncoderConfig, lambda said: {EC_EXTRA: said}, EC_EXTRA),
    (KVConfig, lambda said: connector("KVShareConnector", **said), KV_EXTRA),
    (
        KVConfig,
        lambda said: (
            connector("KVShareConnector", **said)
            | {"kv_connector_module_path": "kvshare.connector"}
        ),
        KV_EXTRA,
    ),
    (TierConfig, lambda said: offloading(tier(**said)), f"{KV_EXTRA}.secondary_tiers[0]"),
    (
        KVConfig,
        lambda said: (
            connector("MultiConnector", connectors=[connector("KVShareConnector", **said)])
            | {"kv_load_failure_policy": "recompute"}
        ),
        f"{KV_EXTRA}.connectors[0].{KV_EXTRA}",
    ),
    (
        TierConfig,
        lambda said: connector("MultiConnector", connectors=[offloading(tier(**said))]),
        f"{KV_EXTRA}.connectors[0].{KV_EXTRA}.secondary_tiers[0]",
    ),
]


@pytest.mark.parametrize(("config", "form", "path"), FORMS)
def test_every_option_is_parsed_in_every_form(
    tmp_path: Path, config: type[StoreConfig], form: Any, path: str
) -> None:
    said = options_of(config)
    text = json.dumps(form(said))
    file = tmp_path / "options.json"
    file.write_text(text + "\n")
    for argument in (text, f"@{file}"):
        (subject,), strangers = read_argument(argument)
        assert not strangers
        assert subject.path == path
        assert subject.config == config(**said)


def test_url_alone_is_accepted() -> None:
    assert read_argument("s3://b/p") == ([(StoreConfig(url="s3://b/p"), "options")], [])


MIXED = connector(
    "MultiConnector",
    connectors=[
        connector("NixlConnector", num_threads=3),
        connector("KVShareConnector", url="/a"),
        offloading({"type": "fs", "root_dir": "/b"}, tier(url="/b", epoch="e")),
        connector("Theirs") | {"kv_connector_module_path": "their.module"},
    ],
) | {"kv_load_failure_policy": "recompute"}


def test_foreign_connectors_beside_ours_are_named() -> None:
    subjects, strangers = read_argument(json.dumps(MIXED))
    place = f"{KV_EXTRA}.connectors"
    assert [(each.config.url, each.path) for each in subjects] == [
        ("/a", f"{place}[1].{KV_EXTRA}"),
        ("/b", f"{place}[2].{KV_EXTRA}.secondary_tiers[1]"),
    ]
    assert [str(each) for each in strangers] == [
        f"{place}[0].kv_connector: 'NixlConnector' is not our KVShareConnector",
        f"{place}[2].{KV_EXTRA}.secondary_tiers[0].type: 'fs' is not our KVShareTier",
        f"{place}[3].kv_connector: 'Theirs' of their.module is not our KVShareConnector",
    ]


def test_multi_connector_needs_the_recompute_policy() -> None:
    """vLLM's scheduler reads the outermost policy; our connector below can set only a copy's."""
    below = connector("MultiConnector", connectors=[connector("KVShareConnector", url="/a")])
    (conflict,) = read_argument(json.dumps(below))[1]
    assert str(conflict).startswith('kv_load_failure_policy: write "recompute"')
    said = below | {"kv_load_failure_policy": "recompute"}
    assert read_argument(json.dumps(said))[1] == []
    nested = connector("MultiConnector", connectors=[below])
    assert [str(each)[:23] for each in read_argument(json.dumps(nested))[1]] == [
        "kv_load_failure_policy:"
    ]
    only_tier = connector("MultiConnector", connectors=[offloading(tier(url="/b", epoch="e"))])
    assert read_argument(json.dumps(only_tier))[1] == []


def test_doctor_reports_a_missing_recompute_policy(doctor: Doctor, tmp_path: Path) -> None:
    below = connector(
        "MultiConnector",
        connectors=[
            connector(
                "KVShareConnector", url=f"{tmp_path}/store", host_cache_dir=f"{tmp_path}/host"
            )
        ],
    )
    status, printed = doctor(argument=json.dumps(below))
    assert status == 1
    assert "PROBLEM" in printed
    assert "kv_load_failure_policy" in printed
    right = below | {"kv_load_failure_policy": "recompute"}
    assert doctor(argument=json.dumps(right))[0] == 0


OURS = "KVShareConnector, ECShareConnector, KVShareTier"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            connector("ECExampleConnector", "ec", shared_storage_path="/x"),
            "ec_connector: 'ECExampleConnector' is not our ECShareConnector. "
            f"The doctor examines the stores of {OURS}",
        ),
        (
            connector("OffloadingConnector", cpu_bytes_to_use=1),
            "kv_connector: OffloadingConnector has no KVShareTier among its secondary_tiers",
        ),
        (
            offloading({"type": "fs"}),
            f"{KV_EXTRA}.secondary_tiers[0].type: 'fs' is not our KVShareTier",
        ),
        (connector("KVSharedConnector"), "'KVSharedConnector' is not our KVShareConnector"),
        (
            connector("ECShareConnector", url="/x"),
            "kv_connector: 'ECShareConnector' is not our KVShareConnector",
        ),
        (connector("x") | {"kv_connector": 3}, "kv_connector: 3 is not our KVShareConnector"),
        (connector("KVShareConnector", chunk_tokens=1), f"{KV_EXTRA}.url: missing"),
        (connector("KVShareConnector", url="/x", save="durable"), f"{KV_EXTRA}.save: unknown"),
        ({EC_EXTRA: {"url": "/x", "chunk_tokens": 1}}, f"{EC_EXTRA}.chunk_tokens: unknown"),
        ({KV_EXTRA: []}, f"{KV_EXTRA}: expected an object of options"),
        (connector("MultiConnector"), f"{KV_EXTRA}.connectors: expected a list"),
        (connector("MultiConnector", connectors=[]), f"{KV_EXTRA}.connectors: expected a list"),
        (
            connector("MultiConnector", connectors=[3]),
            f"{KV_EXTRA}.connectors[0]: expected an object",
        ),
        (
            connector("MultiConnector", connectors=[{}]),
            f"{KV_EXTRA}.connectors[0].kv_connector: missing",
        ),
        (
            connector("MultiConnector") | {KV_EXTRA: []},
            f"{KV_EXTRA}: expected an object of options",
        ),
        (
            connector("OffloadingConnector") | {KV_EXTRA: []},
            f"{KV_EXTRA}: expected an object of options",
        ),
        (
            connector(
                "MultiConnector",
                connectors=[connector("NixlConnector"), connector("KVShareConnector", url=3)],
            ),
            f"{KV_EXTRA}.connectors[1].{KV_EXTRA}.url: expected str",
        ),
        (offloading(tier(url="/x")), f"{KV_EXTRA}.secondary_tiers[0].epoch: missing"),
        (
            offloading(tier(url="/x", epoch="e", save="durable")),
            f"{KV_EXTRA}.secondary_tiers[0].save: unknown option",
        ),
        (
            connector("KVShareConnector", url="/x") | {"kv_connector_module_path": "theirs"},
            "kv_connector: 'KVShareConnector' of theirs is not our KVShareConnector",
        ),
        (
            offloading(tier(url="/x", epoch="e") | {"module_path": "theirs"}),
            f"{KV_EXTRA}.secondary_tiers[0].type: 'KVShareTier' of theirs is not our KVShareTier",
        ),
        (
            connector("OffloadingConnector", secondary_tiers=[tier(url="/x", epoch="e")]),
            f"{KV_EXTRA}.spec_name: vLLM's default takes no secondary_tiers",
        ),
        ({"url": "/\ud800"}, "argument store: not JSON"),
        ({"url": "/x", "wait": 1}, "options.wait: unknown option; did you mean 'wait_s'?"),
        ({"url": "/x", "chunk_token": 1}, "did you mean 'chunk_tokens'?"),
        (
            {"url": "/x", "save": "durable", "chunk_tokens": 1},
            "options.save: unknown option",
        ),
        ({"url": "/x", "locality": "LOCAL"}, "options.epoch: missing"),
    ],
)
def test_config_error_names_the_path_of_the_wrong_option(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_argument(json.dumps(said))


def test_deeply_nested_json_is_refused() -> None:
    with pytest.raises(ConfigError, match="argument store: not JSON"):
        read_argument('{"url":' * 100_000)


def test_each_distinct_store_is_examined_once(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    here = {"url": f"{tmp_path}/store", "host_cache_dir": f"{tmp_path}/host"}
    there = here | {"url": f"{tmp_path}/other"}
    whole = connector(
        "MultiConnector",
        connectors=[
            connector("NixlConnector"),
            connector("KVShareConnector", **here, chunk_tokens=512),
            offloading(tier(**here, epoch="e"), tier(**there, epoch="e")),
        ],
    ) | {"kv_load_failure_policy": "recompute"}
    file = tmp_path / "options.json"
    file.write_text(json.dumps(whole))
    status, text = doctor(argument=f"@{file}")
    assert status == 0, text
    place = f"{KV_EXTRA}.connectors"
    assert f"note    options: {place}[0].kv_connector: 'NixlConnector' is not our KVShareC" in text
    assert text.count("stores, returns") == 2
    same = f"{place}[2].{KV_EXTRA}.secondary_tiers[0] are well-formed; url {here['url']}, "
    assert f"{same}the store of {place}[1].{KV_EXTRA}" in text


def test_problem_of_one_store_does_not_hide_the_others(doctor: Doctor, tmp_path: Path) -> None:
    here = {"url": f"{tmp_path}/store", "host_cache_dir": f"{tmp_path}/host"}
    missing = here | {"url": f"{tmp_path}/missing"}
    children = [connector("KVShareConnector", **each) for each in (missing, here)]
    policy = {"kv_load_failure_policy": "recompute"}
    whole = connector("MultiConnector", connectors=children) | policy
    status, text = doctor(argument=json.dumps(whole))
    assert status == 1
    assert "there is no folder" in text
    assert "stores, returns" in text


def test_foreign_connector_alone_is_a_usage_error(doctor: Doctor) -> None:
    status, text = doctor(argument=json.dumps(connector("LMCacheConnectorV1")))
    assert status == 2
    assert "'LMCacheConnectorV1' is not our KVShareConnector" in text
