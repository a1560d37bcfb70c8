# SPDX-License-Identifier: Apache-2.0
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ecshare.store.config import StoreConfig
from ecshare.store.errors import ConfigError
from ecshare.store.folder.store import DirectoryStore
from ecshare.store.open import open_store

PATH = "ec_connector_extra_config"
KEYS = {"key": "k", "secret": "hidden", "endpoint_url": "http://127.0.0.1:9"}


def refusal(url: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        open_store(StoreConfig(url=url, storage_options=options), PATH)
    return str(caught.value)


@pytest.mark.parametrize("form", ["{}", "file://{}", "local://{}", "file://localhost{}", "{}/"])
def test_folder_url_may_have_several_spellings(tmp_path: Path, form: str) -> None:
    store = open_store(StoreConfig(url=form.format(tmp_path / "store")), PATH)
    assert isinstance(store, DirectoryStore)
    assert (tmp_path / "store").is_dir()


@pytest.mark.parametrize(
    "url", ["store", "./store", "file://store", "file:store", "~/store", "", "file://", "C:\\store"]
)
def test_relative_folder_is_refused(url: str) -> None:
    sentence = refusal(url)
    assert sentence.startswith(f"{PATH}.url: {url!r} is not an absolute folder")
    assert "'/folder'" in sentence


def test_folder_store_takes_no_storage_options(tmp_path: Path) -> None:
    open_store(StoreConfig(url=str(tmp_path), storage_options={"auto_mkdir": True}), PATH)
    assert refusal(str(tmp_path), key="x").startswith(f"{PATH}.storage_options.key: a folder")


def test_unknown_protocol_is_refused_with_a_hint() -> None:
    assert refusal("ss3://bucket") == f"{PATH}.url: unknown protocol 'ss3'; did you mean 's3'?"
    assert "known: " in refusal("xyzzy://bucket")


def test_chained_urls_are_refused() -> None:
    assert refusal("simplecache::s3://bucket").startswith(f"{PATH}.url: chained urls")


def test_missing_package_error_contains_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def missing(protocol: str) -> None:
        raise ImportError(f"Install something to access {protocol}")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    monkeypatch.setitem(sys.modules, "ecshare.store.cloud.store", None)
    assert refusal("s3://bucket", **KEYS) == (
        f"{PATH}.url: s3:// needs obstore: pip install obstore botocore (ecshare's extra [s3])"
    )
    assert refusal("gs://bucket").endswith("pip install obstore (ecshare's extra [gcs])")
    assert refusal("az://bucket", account_name="a").endswith(
        "pip install obstore (ecshare's extra [azure])"
    )
    assert refusal("sftp://host/x").endswith("Install something to access sftp")
    assert refusal("s3://bucket", **KEYS, event_hooks={}) == (
        f"{PATH}: obstore has no option event_hooks; that needs s3fs: "
        "pip install s3fs (ecshare's extra [s3fs])"
    )
    assert refusal("gs://bucket", requester_pays=True) == (
        f"{PATH}: obstore has no option requester_pays; that needs gcsfs: pip install gcsfs"
    )
    assert refusal("az://box", account_name="a", timeout=3).endswith("adlfs: pip install adlfs")


def test_options_the_filesystem_does_not_take_are_refused() -> None:
    assert refusal("github://x", org=3).startswith(f"{PATH}.storage_options: ")


ROAD: dict[str, Any] = {"s3_additional_kwargs": {}}
UNKNOWN = "s3fs, which opens this store, does not know it; "


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({**ROAD, "region": "r"}, f"region: {UNKNOWN}write client_kwargs.region_name"),
        ({**ROAD, "region_name": "r"}, f"region_name: {UNKNOWN}write client_kwargs.region_name"),
        (
            {**ROAD, "aws_endpoint": KEYS["endpoint_url"]},
            f"aws_endpoint: {UNKNOWN}write endpoint_url",
        ),
        ({**ROAD, "client_kwargs.verify": False}, f"client_kwargs.verify: {UNKNOWN}write client_"),
        ({**ROAD, "unsigned_payload": True}, f"unsigned_payload: {UNKNOWN}known: "),
        ({"cache_region": True}, f"cache_region: {UNKNOWN}did you mean 'cache_regions'?"),
        ({"xyzzy": 1}, f"xyzzy: {UNKNOWN}known: anon, "),
    ],
)
def test_option_that_s3fs_does_not_know_is_refused(options: dict[str, Any], sentence: str) -> None:
    assert refusal("s3://bucket", **KEYS, **options).startswith(
        f"{PATH}.storage_options.{sentence}"
    )


def test_profile_works_through_s3fs() -> None:
    open_store(StoreConfig(url="s3://bucket", storage_options={**ROAD, "profile": "team"}), PATH)


def test_obstores_option_names_are_refused_without_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ecshare.store.cloud.store", None)
    open_store(StoreConfig(url="s3://bucket", storage_options=KEYS), PATH)
    assert "s3fs, which opens this store, does not know" in refusal(
        "s3://bucket", **KEYS, region="r"
    )


def test_client_of_a_store_is_logged_once_without_secrets(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG, logger="ecshare")
    for url, options in (
        (str(tmp_path), {}),
        ("memory://x", {}),
        ("s3://bucket/x", KEYS),
        ("s3://bucket/x", {**KEYS, "s3_additional_kwargs": {}}),
        ("az://container/x", {"account_name": "a", "sas_token": "sig=hidden"}),
        ("gs://bucket/x", {"token": "hidden"}),
    ):
        open_store(StoreConfig(url=url, storage_options=options), PATH)
    assert caplog.messages == [
        f"store {tmp_path} is accessed through files",
        "store memory://x is accessed through fsspec",
        "store s3://bucket/x is accessed through obstore",
        "store s3://bucket/x is accessed through fsspec, because obstore has no option "
        "s3_additional_kwargs",
        "store az://container/x is accessed through obstore",
        "store gs://bucket/x is accessed through obstore",
    ]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("ecshare.store.open", "torch vllm fsspec obstore s3fs botocore"),
        ("ecshare.store.objects", "torch vllm fsspec obstore s3fs botocore"),
        ("ecshare.store.hostcache.cache", "torch vllm fsspec obstore s3fs botocore"),
        ("ecshare.store.folder.store", "torch vllm fsspec obstore s3fs botocore"),
        ("ecshare.store.format", "torch vllm fsspec obstore numpy"),
        ("ecshare.store.fsspec.store", "torch vllm obstore s3fs botocore"),
        ("ecshare.store.cloud.plan", "torch vllm fsspec obstore botocore"),
        ("ecshare.store.cloud.store", "torch vllm fsspec s3fs botocore"),
    ],
)
def test_module_import_pulls_in_no_heavy_package(module: str, absent: str) -> None:
    script = f"import sys, {module}; print(*(set({absent!r}.split()) & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == ""
