# SPDX-License-Identifier: Apache-2.0
"""Azure's specifics. The contract suite tests what every store must do."""

import base64
import os
from typing import Any

import pytest

from ecshare.store.cloud.plan import CloudPlan, plan
from ecshare.store.cloud.store import CloudStore
from ecshare.store.config import StoreConfig
from ecshare.store.errors import ConfigError, ObjectCorrupt, StoreDenied, StoreUnavailable
from ecshare.store.keys import Kind, object_key
from ecshare.store.objects import probe, read
from ecshare.store.open import open_store
from tests.bad_s3.faults import always
from tests.bad_s3.server import bad_s3, refused
from tests.ecshare.store.azurite import CONTAINER, KEY, OTHER_ACCOUNT, Azurite
from tests.ecshare.store.conftest import azure_config

PATH = "ec_connector_extra_config"
URL = "az://container/a/prefix/"
NAMED = {"account_name": "account"}
HIDDEN = base64.b64encode(b"hidden").decode()


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("AZURE_"):
            monkeypatch.delenv(name)


def planned(url: str = URL, **options: Any) -> CloudPlan:
    found = plan(StoreConfig(url=url, storage_options=options), PATH)
    assert isinstance(found, CloudPlan), found
    return found


def refusal(url: str = URL, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(StoreConfig(url=url, storage_options=options), PATH)
    return str(caught.value)


def credentials(found: CloudPlan) -> dict[str, Any]:
    assert found.credentials is None
    names = ("account_key", "sas_key", "token", "credential_type")
    return {name: found.config[name] for name in names if name in found.config}


def test_account_name_and_key_are_used() -> None:
    found = planned(**NAMED, account_key=KEY, anon=None)
    assert (found.bucket, found.prefix) == ("container", "a/prefix")
    assert found.client == {"allow_http": False}
    assert found.config == {
        "account_key": KEY,
        "account_name": "account",
        "credential_type": "access_key",
        "skip_signature": False,
        "use_emulator": False,
    }


@pytest.mark.parametrize(
    "options",
    [
        {"azure_storage_account_name": "account", "azure_storage_account_key": KEY},
        {"account_name": "account", "account_key": KEY, "account_host": "blobs.example"},
        {"account_name": "account", "account_key": KEY, "azure_endpoint": "https://blobs.example"},
    ],
)
def test_obstores_option_names_are_accepted(options: dict[str, Any]) -> None:
    endpoint = "" if "azure_storage_account_name" in options else "https://blobs.example"
    found = planned(**options)
    assert found.config.get("endpoint", "") == endpoint
    assert (found.config["account_name"], found.config["account_key"]) == ("account", KEY)


def test_identity_options_choose_the_credential_type() -> None:
    found = planned(**NAMED, client_id="c", authority_host="https://login.example", token="t")
    assert credentials(found) == {"token": "t", "credential_type": "bearer_token"}
    assert found.config["authority_host"] == "https://login.example"
    assert found.config["client_id"] == "c"
    by_cli = planned(**NAMED, use_azure_cli=True)
    assert credentials(by_cli) == {"credential_type": "azure_cli"}
    by_machine = planned(**NAMED, object_id="o")
    assert credentials(by_machine) == {"credential_type": "managed_identity"}
    assert credentials(planned(**NAMED, use_azure_cli=False)) == {}


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("abfs://container@account.dfs.core.windows.net/x", None),
        ("abfss://container@account.blob.core.windows.net/x", None),
        ("az://container@account.dfs.core.example.cn/x", "https://account.blob.core.example.cn"),
    ],
)
def test_url_may_name_the_account(url: str, endpoint: str | None) -> None:
    found = planned(url, sas_token="?sv=1&sig=2")
    assert (found.bucket, found.prefix) == ("container", "x")
    assert found.config["account_name"] == "account"
    assert found.config.get("endpoint") == endpoint
    assert credentials(found) == {"sas_key": "sv=1&sig=2", "credential_type": "sas_token"}


def test_connection_string_sets_endpoint_and_credentials() -> None:
    found = planned(
        connection_string=f"DefaultEndpointsProtocol=https;AccountName=account;AccountKey={KEY};"
        "EndpointSuffix=core.example.us"
    )
    assert found.config["endpoint"] == "https://account.blob.core.example.us"
    assert credentials(found) == {"account_key": KEY, "credential_type": "access_key"}
    found = planned(
        connection_string="AccountName=account;BlobEndpoint=http://127.0.0.1:1/account/;"
        "SharedAccessSignature=sv=1&sig=2"
    )
    assert found.config["endpoint"] == "http://127.0.0.1:1/account"
    assert found.client == {"allow_http": True}
    assert credentials(found) == {"sas_key": "sv=1&sig=2", "credential_type": "sas_token"}


def test_client_secret_is_used_and_never_shown() -> None:
    found = planned(**NAMED, client_id="c", tenant_id="t", client_secret="hidden")
    assert credentials(found) == {"credential_type": "client_secret"}
    assert found.config["client_secret"] == "hidden"
    assert "hidden" not in repr(found)
    config = StoreConfig(url=URL, storage_options={**NAMED, "client_secret": "hidden"})
    with pytest.raises(ConfigError, match="'client_secret' was requested but required") as caught:
        open_store(config, PATH)
    assert "hidden" not in str(caught.value)


def test_invalid_account_key_is_refused() -> None:
    config = StoreConfig(url=URL, storage_options={**NAMED, "account_key": "hid"})
    with pytest.raises(ConfigError, match="storage_options: obstore .* Invalid Access Key"):
        open_store(config, PATH)


def test_options_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"AccountName=env;AccountKey={HIDDEN}")
    assert planned().config["account_name"] == "env"
    assert credentials(planned()) == {"account_key": HIDDEN, "credential_type": "access_key"}
    found = planned(**NAMED)
    assert found.config["account_name"] == "account"
    assert credentials(found) == {}
    sas = {"sas_key": "sv=1", "credential_type": "sas_token"}
    assert credentials(planned(sas_token="?sv=1")) == sas
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", HIDDEN)
    assert credentials(planned(**NAMED, account_key=KEY)) == {
        "account_key": KEY,
        "credential_type": "access_key",
    }


def test_anon_is_ignored_if_credentials_are_given() -> None:
    assert planned(**NAMED, anon=True).config["skip_signature"] is True
    assert planned(**NAMED, anon=True, account_key=KEY).config["skip_signature"] is False


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"credential": object()}, "credential"),
        ({"location_mode": "secondary"}, "location_mode"),
        ({"read_timeout": 3}, "read_timeout"),
    ],
)
def test_options_only_adlfs_knows_select_fsspec(options: dict[str, Any], reason: str) -> None:
    config = StoreConfig(url=URL, storage_options={**NAMED, **options})
    assert plan(config, PATH) == f"obstore has no option {reason}"


@pytest.mark.parametrize(
    ("url", "options", "sentence"),
    [
        (URL, {}, "storage_options.account_name: missing; give it, or a connection_string"),
        (URL, {"acount_name": "a"}, "storage_options.acount_name: unknown option; did you mean 'a"),
        (URL, {**NAMED, "account_key": 3}, "storage_options.account_key: expected a string"),
        (URL, {**NAMED, "use_azure_cli": "x"}, "storage_options.use_azure_cli: expected true or f"),
        (
            URL,
            {**NAMED, "sas_token": "a", "sas_key": "b"},
            "storage_options.sas_key: contradicts s",
        ),
        (URL, {**NAMED, "sas_token": ""}, "storage_options.sas_token: is empty"),
        ("az://", NAMED, "url: 'az://' names no bucket or container"),
        ("az://Container", NAMED, "url: 'az://Container' names no bucket or container"),
        ("az://container/a//b", NAMED, "url: the prefix 'a//b' has an empty or dotted level"),
        ("abfs://container@host/x", NAMED, "url: 'abfs://***@host/x' names no bucket or container"),
        (
            "abfs://container@other.dfs.core.windows.net/x",
            NAMED,
            "storage_options.account_name: 'account' and 'other' are both named",
        ),
    ],
)
def test_wrong_option_is_named(url: str, options: dict[str, Any], sentence: str) -> None:
    assert refusal(url, **options).startswith(f"{PATH}.{sentence}")


def test_store_id_depends_on_the_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host's cached objects must not be taken for those of another account."""

    def store_id(url: str = "az://container/x", **options: object) -> str:
        return StoreConfig(url=url, storage_options=options).store_id()

    one = store_id(account_name="one")
    assert store_id(account_name="one", account_key=KEY) == one
    assert store_id(connection_string=f"AccountName=one;AccountKey={KEY}") == one
    assert store_id(azure_storage_account_name="one") == one
    assert store_id(account_name="two") != one
    elsewhere = store_id(account_name="one", account_host="one.blob.example.cn")
    assert store_id(account_name="one", endpoint="https://one.blob.example.cn/") == elsewhere
    assert store_id(account_name="one", account_host="one.blob.example.cn") != one
    assert store_id("abfs://container@one.dfs.core.windows.net/x") != store_id(
        "abfs://container@two.dfs.core.windows.net/x"
    )
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "one")
    assert store_id() == one
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "two")
    assert store_id() != one
    assert store_id(account_name=3) != one  # refused elsewhere


def test_secrets_are_not_in_reprs() -> None:
    hidden = {
        "account_key": "hidden1",
        "sas_token": "hidden2",
        "connection_string": "AccountName=a;hidden3",
        "client_secret": "hidden4",
    }
    assert "hidden" not in repr(StoreConfig(url=URL, storage_options=hidden))
    found = planned(**NAMED, account_key=HIDDEN, client_id="c")
    assert HIDDEN not in repr(found)


@pytest.mark.azure
@pytest.mark.nightly
async def test_azurite_errors_name_the_problem(azurite: Azurite) -> None:
    wrong_key = azure_config(
        azurite,
        connection_string=azurite.storage_options()["connection_string"].replace(KEY, HIDDEN),
    )
    wrong_token = azure_config(
        azurite,
        connection_string=f"AccountName=ecsharetest;BlobEndpoint={azurite.endpoint()};"
        "SharedAccessSignature=sv=2021-12-02&sig=hidden%3D&se=2099-01-01&sp=rw&sr=c",
    )
    anonymous = azure_config(
        azurite,
        connection_string=f"AccountName=ecsharetest;BlobEndpoint={azurite.endpoint()}",
        anon=True,
    )
    for config in (wrong_key, wrong_token, anonymous):
        store = open_store(config, "options")
        assert isinstance(store, CloudStore)
        for write in (False, True):
            with pytest.raises(StoreDenied, match=r"store( at \S+)? answered 403 Auth") as caught:
                await probe(store, write=write)
            assert "hidden" not in str(caught.value)
            assert "\n" not in str(caught.value)
        await store.close()
    nothing = open_store(azure_config(azurite, "az://nothing/x"), "options")
    with pytest.raises(StoreUnavailable, match="the container does not exist"):
        await probe(nothing, write=True)
    await nothing.close()


@pytest.mark.azure
async def test_two_accounts_hold_separate_objects(azurite: Azurite) -> None:
    key = object_key(Kind.EC, "0" * 32, "an object")
    url = f"az://{CONTAINER}/accounts"
    one = open_store(azure_config(azurite, url), "options")
    two = open_store(
        azure_config(azurite, url, **azurite.storage_options(OTHER_ACCOUNT)), "options"
    )
    await one.put(key, b"of one")
    assert await two.exists([key]) == [False]
    await two.put(key, b"of two")
    assert bytes(await read(one, key, 100)) == b"of one"
    await one.close()
    await two.close()


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("BlobAlreadyExists", None),
        ("BlobArchived", ObjectCorrupt),
        ("ContainerBeingDeleted", StoreUnavailable),
        ("PublicAccessNotPermitted", StoreDenied),
    ],
)
async def test_conflict_code_decides_if_the_object_exists(
    code: str, error: type[Exception] | None
) -> None:
    """The codes are from Azure's documentation; no emulator returns them."""
    with bad_s3(always(refused(409, code))) as server:
        text = f"AccountName=account;AccountKey={KEY};BlobEndpoint={server.endpoint}/account"
        config = StoreConfig(url=URL, storage_options={"connection_string": text})
        store = open_store(config, "options")
        key = object_key(Kind.EC, "0" * 32, "an object")
        if error is None:
            assert await store.put(key, b"x") is False
        else:
            with pytest.raises(error, match=f"409 {code}"):
                await store.put(key, b"x")
        await store.close()
