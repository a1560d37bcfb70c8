# SPDX-License-Identifier: Apache-2.0
"""Google's specifics. The contract suite tests what every store must do."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ecshare.store.cloud.plan import CloudPlan, plan
from ecshare.store.config import StoreConfig
from ecshare.store.errors import ConfigError, StoreDenied, StoreUnavailable
from ecshare.store.keys import Kind, object_key
from ecshare.store.objects import probe
from ecshare.store.open import open_store
from tests.bad_s3.faults import modes
from tests.bad_s3.server import BadS3
from tests.ecshare.store.conftest import gcs_config

PATH = "ec_connector_extra_config"
URL = "gs://bucket/a/prefix/"
SERVICE = {"type": "service_account", "client_email": "a@b", "private_key": "hidden"}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("GOOGLE_", "STORAGE_EMULATOR")):
            monkeypatch.delenv(name)


def planned(url: str = URL, **options: Any) -> CloudPlan:
    found = plan(StoreConfig(url=url, storage_options=options), PATH)
    assert isinstance(found, CloudPlan), found
    return found


def refusal(url: str = URL, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(StoreConfig(url=url, storage_options=options), PATH)
    return str(caught.value)


def test_default_options_use_googles_service() -> None:
    spelt_out = planned(token="google_default", project="p")
    for found in (planned(), spelt_out):
        assert (found.bucket, found.prefix) == ("bucket", "a/prefix")
        assert found.credentials is None
        assert found.config == {"skip_signature": False}
        assert found.client == {"allow_http": False}


def test_emulator_is_used_if_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(endpoint_url="http://localhost:1/", token="anon")
    assert found.config == {"skip_signature": True, "base_url": "http://localhost:1"}
    assert found.client == {"allow_http": True}
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "localhost:2")
    assert planned().config["base_url"] == "http://localhost:2"


def test_token_may_be_a_file_an_account_or_a_bearer_token(tmp_path: Path) -> None:
    file = tmp_path / "account.json"
    file.write_text(json.dumps(SERVICE))
    assert planned(token=str(file)).config["service_account"] == str(file)
    of_text = planned(token=json.dumps(SERVICE))
    assert json.loads(of_text.config["service_account_key"]) == SERVICE
    bearer = planned(token="ya29.hidden/x")
    assert bearer.credentials is not None
    assert bearer.credentials()["token"] == "ya29.hidden/x"
    assert "bearer_token" not in bearer.config
    for found in (bearer, of_text):
        assert "hidden" not in repr(found)


def test_obstores_option_names_are_accepted() -> None:
    found = planned(google_service_account="/account.json", base_url="https://google.example")
    assert found.config["service_account"] == "/account.json"
    assert found.config["base_url"] == "https://google.example"
    bearer = planned(bearer_token="hidden").credentials
    assert bearer is not None
    assert bearer()["token"] == "hidden"
    assert planned(application_credentials="/x").config["application_credentials"] == "/x"
    anonymous = planned(skip_signature=True)
    assert planned(anon=True).config == anonymous.config
    assert anonymous.config == planned(token="anon").config == {"skip_signature": True}
    assert anonymous.credentials is not None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"requester_pays": True}, "obstore has no option requester_pays"),
        ({"access": "read_only"}, "obstore has no option access"),
        ({"token": "browser"}, "only gcsfs knows the token 'browser'"),
    ],
)
def test_options_only_gcsfs_knows_select_fsspec(options: dict[str, Any], reason: str) -> None:
    found = plan(StoreConfig(url=URL, storage_options=options), PATH)
    assert isinstance(found, str)
    assert found.startswith(reason)


@pytest.mark.parametrize("token", ["/no/such", "no_such.json", '{"type": "external_account"}', "{"])
def test_unusable_token_is_a_config_error(token: str) -> None:
    with pytest.raises(ConfigError, match="storage_options: obstore cannot use them: Generic GCS"):
        open_store(StoreConfig(url=URL, storage_options={"token": token}), PATH)


@pytest.mark.parametrize(
    ("url", "options", "sentence"),
    [
        (URL, {"tokn": "x"}, "storage_options.tokn: unknown option; did you mean 'token'?"),
        (URL, {"token": ""}, "storage_options.token: is empty"),
        (URL, {"token": SERVICE}, "storage_options.token: expected a string, got dict"),
        (URL, {"token": "t", "bearer_token": "u"}, "storage_options.token: contradicts bearer_tok"),
        (URL, {"endpoint_url": "ftp://x"}, "storage_options.endpoint_url: 'ftp://x' is no endp"),
        (URL, {"base_url": "ftp://x"}, "storage_options.base_url: 'ftp://x' is no endp"),
        ("gs://", {}, "url: 'gs://' names no bucket or container; write gs://bucket/prefix"),
        ("gs://bucket/../x", {}, "url: the prefix '../x' has an empty or dotted level"),
    ],
)
def test_wrong_option_is_named(url: str, options: dict[str, Any], sentence: str) -> None:
    assert refusal(url, **options).startswith(f"{PATH}.{sentence}")


def test_unusable_account_is_a_config_error_without_secrets() -> None:
    config = StoreConfig(url=URL, storage_options={"token": json.dumps(SERVICE)})
    with pytest.raises(ConfigError) as caught:
        open_store(config, PATH)
    assert str(caught.value).startswith(f"{PATH}.storage_options: obstore cannot use them: ")
    assert "hidden" not in str(caught.value)


def test_store_id_depends_on_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    def store_id(**options: object) -> str:
        return StoreConfig(url="gs://bucket/x", storage_options=options).store_id()

    assert store_id(token="t") == store_id() != store_id(endpoint_url="http://one")
    assert store_id(base_url="http://one") == store_id(endpoint_url="http://one")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "one")
    assert store_id() == store_id(endpoint_url="http://one")


async def test_every_request_carries_the_token_unless_anonymous(gcs: BadS3) -> None:
    key = object_key(Kind.EC, "0" * 32, "an object")
    for token, header in (("t-1", "Bearer t-1"), ("anon", None)):
        store = open_store(gcs_config(gcs, token=token), "options")
        await probe(store, write=True)
        await store.put(key, b"x", replace=True)
        await store.delete([key])
        await store.close()
        sent = {headers.get("authorization", "").strip() or None for *_, headers in gcs.requests}
        assert sent - {"Bearer"} == {header}
        gcs.requests.clear()


async def test_server_errors_are_mapped(gcs: BadS3) -> None:
    store = open_store(gcs_config(gcs, "gs://nothing/x"), "options")
    with pytest.raises(StoreUnavailable, match="the bucket does not exist"):
        await probe(store, write=True)
    await store.close()
    gcs.faults = modes("any:403")
    store = open_store(gcs_config(gcs), "options")
    with pytest.raises(StoreDenied, match=r"http:\S+ answered 403 AccessDenied: Words"):
        await probe(store, write=True)
    await store.close()


async def test_delete_of_many_keys_ignores_missing_ones(gcs: BadS3) -> None:
    store = open_store(gcs_config(gcs), "options")
    keys = [object_key(Kind.EC, "0" * 32, str(n)) for n in range(40)]
    await store.put(keys[-1], b"x")
    await store.delete(keys)
    assert await store.exists(keys[-1:]) == [False]
    await store.close()
