# SPDX-License-Identifier: Apache-2.0
import re
from typing import Any

import pytest

from ecshare.store.config import StoreConfig, parse
from ecshare.store.errors import ConfigError
from ecshare.store.secrets import masked, masked_url

PATH = "ec_connector_extra_config"


class Longer(StoreConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a connector beside the store's, as connectors define them."""

    save: str = "durable"


def test_url_is_the_only_required_option() -> None:
    config = parse(StoreConfig, {"url": "s3://bucket"}, PATH)
    assert (config.wait_s, config.io_timeout_s) == (5.0, 10.0)
    assert (config.buffer_bytes, config.host_cache_bytes) == (1 << 30, 4 << 30)
    assert config.storage_options == {}


def test_seconds_may_be_an_integer() -> None:
    assert parse(StoreConfig, {"url": "/x", "wait_s": 3}, PATH).wait_s == 3.0


def test_parse_does_not_change_the_users_dict() -> None:
    raw = {"url": "/x", "storage_options": {"key": "k"}}
    parse(StoreConfig, raw, PATH)
    assert raw == {"url": "/x", "storage_options": {"key": "k"}}


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ({"urll": "/x"}, f"{PATH}.urll: unknown option; did you mean 'url'?"),
        (
            {"url": "/x", "xyzzy": 1},
            f"{PATH}.xyzzy: unknown option; known: accepted_integrity_key, ",
        ),
        ({}, f"{PATH}.url: missing, and it has no default"),
        ({"url": 3}, f"{PATH}.url: expected str, got int"),
        ({"url": None}, f"{PATH}.url: expected str, got null"),
        ({"url": "/x", "wait_s": "5"}, f"{PATH}.wait_s: expected float, got str"),
        ({"url": "/x", "wait_s": 0}, f"{PATH}.wait_s: expected float > 0"),
        ({"url": "/x", "wait_s": float("inf")}, f"{PATH}.wait_s: expected float <= 3600"),
        ({"url": "/x", "wait_s": float("nan")}, f"{PATH}.wait_s: expected float"),
        ({"url": "/x", "buffer_bytes": True}, f"{PATH}.buffer_bytes: expected int, got bool"),
        ({"url": "/x", "buffer_bytes": 1.5}, f"{PATH}.buffer_bytes: expected int, got float"),
        ({"url": "/x", "host_cache_bytes": -1}, f"{PATH}.host_cache_bytes: expected int >= 1"),
        (
            {"url": "/x", "storage_options": []},
            f"{PATH}.storage_options: expected object, got array",
        ),
        ({"url": "/x", "epoch": "x" * 129}, f"{PATH}.epoch: expected str of length <= 128"),
        ([], f"{PATH}: expected an object of options, got list"),
        (None, f"{PATH}: expected an object of options, got nothing"),
        ({1: 2}, f"{PATH}.1: unknown option"),
    ],
)
def test_config_error_names_the_users_path_of_the_option(raw: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(StoreConfig, raw, PATH)
    assert str(caught.value).startswith(sentence)
    assert "$" not in str(caught.value)


def test_options_of_a_subclass_are_checked_together() -> None:
    assert parse(Longer, {"url": "/x", "save": "announced"}, PATH).save == "announced"
    with pytest.raises(ConfigError, match="did you mean 'save'"):
        parse(Longer, {"url": "/x", "savee": "announced"}, PATH)


def test_secrets_are_masked_in_repr_and_logs() -> None:
    config = Longer(
        url="sftp://user:hidden1@host/x",
        storage_options={
            "key": "hidden2",
            "secret": "hidden3",
            "token": "hidden4",
            "anon": False,
            "endpoint_url": "http://shown:9000",
            "client_kwargs": {"region_name": "shown", "aws_session_token": "hidden5"},
            "account": [{"password": "hidden6"}],
            "connection_string": "AccountName=a;hidden7",
            "proxy": "http://user:hidden8@shown",
        },
    )
    for text in (repr(config), str(config), f"{config}", str(config.for_log())):
        assert "hidden" not in text
        assert "http://shown:9000" in text
        assert "'region_name': 'shown'" in text
        assert "'anon': False" in text
        assert "save" in text


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sftp://user@host/x", "sftp://***@host/x"),
        ("sftp://user:p@ss@host/x", "sftp://***@host/x"),
        ("sftp://us@er:p@ss@host/x@y", "sftp://***@y"),
        ("s3://key:sec/ret@bucket/x", "s3://***@bucket/x"),
        ("s3://bucket/a@b:c", "s3://bucket/a@b:c"),
        ("http://host:9000/x", "http://host:9000/x"),
        ("/folder/a@b", "/folder/a@b"),
    ],
)
def test_masked_url_hides_everything_before_the_last_at_sign(url: str, shown: str) -> None:
    assert masked_url(url) == shown


def test_masking_does_not_change_the_options() -> None:
    options = {"secret": "x"}
    assert masked(options) == {"secret": "***"}
    assert options == {"secret": "x"}


def test_store_id_depends_on_location_not_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)

    def store_id(url: str, **options: object) -> str:
        return StoreConfig(url=url, storage_options=options).store_id()

    plain = store_id("s3://b/p")
    assert re.fullmatch(r"[0-9a-f]{16}", plain)
    assert store_id("s3://b/p/", key="k", secret="s") == plain
    assert store_id("s3://b/q") != plain
    at_home = store_id("s3://b/p", endpoint_url="http://one")
    assert at_home != plain
    assert store_id("s3://b/p", client_kwargs={"endpoint_url": "http://one"}) == at_home
    for name in ("endpoint", "aws_endpoint", "aws_endpoint_url"):
        assert store_id("s3://b/p", **{name: "http://one"}) == at_home
    assert store_id("s3://b/p", endpoint_url="http://two") != at_home
    assert store_id("file:///folder") == store_id("/folder")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://one")
    assert store_id("s3://b/p") == at_home
