# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec import AbstractFileSystem

from ecshare.store.config import StoreConfig, parse
from ecshare.store.errors import ConfigError
from ecshare.store.open import open_store
from ecshare.store.secrets import masked, masked_text, masked_url

PATH = "kv_connector_extra_config"
S3 = "s3://bucket/prefix"


def parsed(url: str = S3, integrity_key: str = "", **storage_options: Any) -> StoreConfig:
    raw = {"url": url, "integrity_key": integrity_key, "storage_options": storage_options}
    return parse(StoreConfig, raw, PATH)


# --- sources of secrets ---


def test_secret_may_come_from_the_environment_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OURS", "hidden1")
    (tmp_path / "secret").write_text(" hidden2\n")
    config = parsed(
        secret="env:OURS",
        token=f"file:{tmp_path}/secret",
        client_kwargs={"headers": [{"X-Key": "env:OURS"}]},
        endpoint_url="env:OURS",
    )
    options = config.storage_options
    assert (options["secret"], options["token"]) == ("hidden1", "hidden2")
    assert options["client_kwargs"]["headers"][0]["X-Key"] == "hidden1"
    assert config.storage_options["endpoint_url"] == "hidden1"
    for text in (repr(config), str(config.for_log()), json.dumps(config.for_log())):
        assert "hidden" not in text
        assert "env:OURS" in text
        assert f"file:{tmp_path}/secret" in text


def test_file_url_is_a_reference_only_in_a_secret_option(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hidden")
    there = f"file://{tmp_path}/secret"
    config = parsed(fo=there, password=there)
    assert config.storage_options == {"fo": there, "password": "hidden"}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("env:NOT_SET_AT_ALL", "'env:NOT_SET_AT_ALL' is not set, or is empty"),
        ("env:", "is not set, or is empty"),
        ("env:a\0b", "is not set, or is empty"),
        ("file:/does/not/exist", "/does/not/exist cannot be read"),
        ("file:/a\0b", "cannot be read"),
        ("file:/dev/null", "is empty"),
        ("file:{here}/latin-1", "is not text in UTF-8"),
        ("file:{here}", "cannot be read"),
    ],
)
def test_unreadable_secret_reference_is_refused(tmp_path: Path, value: str, words: str) -> None:
    (tmp_path / "latin-1").write_bytes(b"\xff")
    with pytest.raises(ConfigError) as caught:
        parsed(client_kwargs={"password": value.format(here=tmp_path)})
    assert str(caught.value).startswith(f"{PATH}.storage_options.client_kwargs.password: ")
    assert words in str(caught.value)


def test_google_account_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ecshare.store.cloud.plan import CloudPlan, plan

    account = json.dumps({"type": "service_account", "private_key": "hidden"})
    monkeypatch.setenv("ACCOUNT", account)
    found = plan(parsed("gs://bucket/x", token="env:ACCOUNT"), PATH)
    assert isinstance(found, CloudPlan)
    assert found.config["service_account_key"] == account


# --- warnings ---


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"secret": "hidden"}, "secret"),
        ({"account_key": "hidden"}, "account_key"),
        ({"pwd": "hidden"}, "pwd"),
        ({"client_kwargs": {"headers": {"x-own": "hidden"}}}, "client_kwargs.headers.x-own"),
        ({"endpoint_url": "http://me:hidden@host:9000"}, "endpoint_url"),
    ],
)
def test_literal_secret_causes_a_warning_with_a_fix(options: dict[str, Any], field: str) -> None:
    (warning,) = parsed(**options).warnings(PATH)
    assert warning.startswith(f"{PATH}.storage_options.{field}: a secret is written into the conf")
    assert "write env:NAME or file:/path" in warning
    assert "hidden" not in warning


def test_integrity_key_and_url_password_are_secrets_too() -> None:
    one, two = parsed("sftp://me:hidden@host/x", integrity_key="hidden").warnings(PATH)
    assert one.startswith(f"{PATH}.url: ")
    assert f"{PATH}.storage_options.password" in one
    assert two.startswith(f"{PATH}.integrity_key: ")
    assert "hidden" not in one + two


def test_references_and_non_secrets_cause_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OURS", "hidden1")
    (tmp_path / "secret").write_text("hidden2")
    config = parsed(
        "sftp://me@host/x",
        integrity_key="env:OURS",
        key="AKIAIOSFODNN7EXAMPLE",
        secret="env:OURS",
        token=f"file:{tmp_path}/secret",
        anon=False,
        key_filename="id_ed25519",
        config_kwargs={"signature_version": "s3v4"},
        endpoint_url="https://s3.example.com",
        tenant_id="01234567-89ab-cdef-0123-456789abcdef",
    )
    assert config.warnings(PATH) == []
    assert parsed("gs://bucket/x", token="google_default").warnings(PATH) == []
    assert parsed("gs://bucket/x", token="/etc/account.json").warnings(PATH) == []


# --- masking ---


@pytest.mark.parametrize(
    "name",
    [
        *("pass", "passwd", "pwd", "password", "cookie", "token", "bearer", "signature", "headers"),
        *("authorization", "sas_url", "credential", "connection_string", "account_key", "private"),
        *("x-amz-security-token", "client_secret", "api_key", "auth", "user_pass", "conn", "dsn"),
        "service_account",
    ],
)
def test_options_with_secret_names_are_masked(name: str) -> None:
    options: dict[str, Any] = {name: "hidden", "list": [{name: ["hidden", {"x": "hidden"}]}]}
    assert "hidden" not in str(masked(options))
    assert "hidden" not in str(masked({name: {"X-Any": "hidden"}}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bypass", "shown"),
        ("key_filename", "/home/me/key"),
        ("signature_version", "s3v4"),
        ("region_name", "us-gov-west-1"),
        ("endpoint_url", "http://minio-1.storage.svc.cluster.local:9000"),
        ("client_id", "01234567-89ab-cdef-0123-456789abcdef"),
        ("verify", "/etc/ssl/certs/ca-certificates.crt"),
        ("anon", True),
        ("token", None),
    ],
)
def test_options_that_are_no_secrets_are_shown(name: str, value: object) -> None:
    assert masked({name: value}) == {name: value}


@pytest.mark.parametrize(
    "text",
    [
        "GET https://a.blob.core.windows.net/c/x?sv=2024&sig=hidden%3D&se=1 failed",
        "GET http://h/x?X-Amz-Credential=hidden&X-Amz-Signature=hidden",
        "PUT http://me:hidden@host:9/x: refused",
        "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=hidden;x",
        "headers {'Authorization': 'AWS4-HMAC-SHA256 Credential=hidden'}",
        "sent Bearer hidden12345",
        "the password=hidden is wrong",
        "obstore says: value 'hidden' is odd",
    ],
)
def test_secrets_in_foreign_text_are_masked(text: str) -> None:
    shown = masked_text(text, {"hidden"} if "obstore" in text else ())
    assert "hidden" not in shown
    assert "***" in shown


def test_text_without_secrets_is_not_masked() -> None:
    text = "GET http://host:9/bucket/key=3?prefix=a failed: the key is gone @ 5 s, 'token' unknown"
    assert masked_text(text, {"abc"}) == text


@pytest.mark.parametrize("url", ["sftp:/me:hidden@host/x", "s3://me:hidden/x", "s3://me:hidden[/x"])
def test_login_of_a_malformed_url_is_masked(url: str) -> None:
    assert "hidden" not in masked_url(url)


class Picky(AbstractFileSystem):  # type: ignore[misc]
    """A filesystem whose error message contains all options."""

    protocol = "picky"

    def __init__(self, **options: Any) -> None:
        raise ValueError(f"cannot work with {options}")


fsspec.register_implementation("picky", Picky)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("ftp://me:hidden{127.0.0.1:1/x", {}),
        ("picky://x", {"password": "hidden"}),
        ("s3://bucket/x", {"s3_additional_kwargs": {}, "config_kwargs": "hidden"}),
        ("sftp:/me:hidden@host/x", {}),
    ],
)
def test_refusals_and_their_causes_contain_no_secret(url: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(parsed(url, **options), PATH)
    assert str(caught.value).startswith(PATH)
    assert "hidden" not in str(caught.value)
    assert caught.value.__cause__ is None


# --- refusals ---


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"x": value}
    return value


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (
            {"url": "/x", "storage_options": nested(600)},
            f".storage_options{'.x' * 32}: nested more than 32 levels",
        ),
        ({"url": "/x\ud800"}, ".url: contains a lone surrogate"),
        ({"url": "/x", "storage_options": {"a": ["\ud800"]}}, ".storage_options.a[0]: contains a"),
        ({"url": "/x", "a\nb": 1}, ": 'a\\nb' is not a name of an option"),
    ],
)
def test_options_that_cannot_be_displayed_are_refused(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(StoreConfig, raw, PATH)
    assert str(caught.value).startswith(PATH + words)
    str(caught.value).encode()
