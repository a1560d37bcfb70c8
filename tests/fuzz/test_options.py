# SPDX-License-Identifier: Apache-2.0
"""Malformed options and command lines: accepted, or refused in one line; none shows a secret."""

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from ecshare.doctor.targets import read_argument
from ecshare.encoder.config import EncoderConfig
from ecshare.router.options.arguments import parse_arguments
from ecshare.store.config import StoreConfig, parse
from ecshare.store.errors import ConfigError
from ecshare.store.integrity import open_integrity
from ecshare.store.open import open_store
from kvshare.config import KVConfig, parse_tier
from tests.fuzz.running import fuzzed
from tests.fuzz.values import ODD_TEXT, mutated, scalars

pytestmark = pytest.mark.fuzz

PATH = "options"
SECRET = "S3CRETVALUE"
NOWHERE = "http://127.0.0.1:9"
FOLDER = "/dev/shm/ecshare-fuzz-options"  # noqa: S108 - never made: only looked at
OPTIONS: list[dict[str, Any]] = [
    {"url": f"{FOLDER}/store"},
    {
        "url": "s3://bucket/prefix",
        "storage_options": {
            "key": "AK",
            "secret": SECRET,
            "endpoint_url": NOWHERE,
            "client_kwargs": {"region_name": "x", "verify": False},
            "config_kwargs": {"s3": {"addressing_style": "path"}, "signature_version": "s3v4"},
            "s3_additional_kwargs": {},
        },
        "integrity_key": f"8f1c6e0b5a9d47233be1f0a47c5d9286-{SECRET}",
        "wait_s": 1,
        "io_timeout_s": 1,
        "buffer_bytes": 1000,
    },
    {"url": "memory://x", "storage_options": {}},
    {"url": f"s3://AK:{SECRET}@bucket/p"},
    {
        "url": "s3://bucket/p",
        "storage_options": {
            "client_kwargs": {"endpoint_url": f"http://user:{SECRET}@127.0.0.1:9"},
            "key": "AK",
            "secret": SECRET,
            "token": SECRET,
        },
    },
    {
        "url": "s3://bucket/p",
        "storage_options": {
            "aws_access_key_id": "AK",
            "secret_access_key": SECRET,
            "endpoint": f"http://user:{SECRET}@127.0.0.1:9",
            "region": "x",
            "verify": "/dev/zero",
            "virtual_hosted_style_request": True,
            "unsigned_payload": False,
            "server_side_encryption": "sse-c",
            "sse_customer_key_base64": SECRET,
        },
    },
    {
        "url": "gs://bucket/p",
        "storage_options": {"service_account_key": SECRET, "base_url": NOWHERE},
    },
    {"url": "gs://bucket/p", "storage_options": {"token": SECRET, "base_url": NOWHERE}},
    {
        "url": "az://container/p",
        "storage_options": {
            "azure_storage_account_name": "abcd",
            "client_id": "x",
            "client_secret": SECRET,
            "tenant_id": "y",
            "endpoint": NOWHERE,
        },
    },
    {
        "url": "s3://bucket/p",
        "storage_options": {"anon": True, "client_kwargs": {"headers": {"Cookie": SECRET}}},
    },
    {
        "url": "az://container/p",
        "storage_options": {"account_name": "abcd", "account_key": "QUJD", "credential": SECRET},
    },
    {
        "url": "az://container/p",
        "storage_options": {
            "connection_string": f"AccountName=abcd;AccountKey={SECRET}",
            "sas_token": f"?sig={SECRET}",
        },
    },
]
URLS = [
    *(
        "",
        "s3://",
        "s3:///",
        "s3://a",
        "s3://bucket/..",
        "s3://bucket//x",
        "file://",
        "file://host/x",
    ),
    *("/", f"{FOLDER}/\x00", "::", "zip://x::s3://b", "s3://BUCKET_!/x", "S3://bucket", "http://["),
    *("s3://b:b@c:c@d/e", "//x", "relative", "~", f"{FOLDER}/{'a' * 300}", "s3://bucket/\u00e9"),
    *("s3://bucket/%2e%2e", f"file://localhost{FOLDER}", "memory://"),
    *(
        "abfs://@x",
        "abfs://c@abcd.dfs.core.windows.net/p",
        "gs://bucket/p",
        "gs://\u00e9",
        "sftp://[",
    ),
    *("ftp://a:b:c/", "reference://x", "git://x", "hf://x", f"ftp://u:{SECRET}x1:1/x"),
    *(f"s3://AK:{SECRET}@bucket/p", f"s3://AK:{SECRET}[bucket/p"),
]
OPENED = ("s3", "s3a", "az", "abfs", "gs", "memory")
"""The schemes that open without network access or effects outside this process."""
NAMES = ["secret", "SECRET_KEY", "api_key", "token", "password", "passphrase", "sas_token"]
NAMES += ["credential", "account_key", "client_secret", "x-amz-security-token", "Authorization"]
CLASSES: list[type[StoreConfig]] = [StoreConfig, EncoderConfig, KVConfig]


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """No credentials but the tests' own, and no metadata service."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_ACCESS_KEY_ID", "AKENV")
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            patch.setenv(name, "/nowhere")
        yield


@st.composite
def options(draw: DrawFn) -> Any:
    said = draw(st.sampled_from(OPTIONS).flatmap(mutated))
    if isinstance(said, dict) and draw(st.integers(0, 4)) == 0:
        said["url"] = draw(st.sampled_from(URLS))
    return said


def check_silent(*texts: str) -> None:
    for text in texts:
        assert SECRET not in text, "a secret is shown"


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """The body may raise ConfigError, one line without secrets."""
    refused = ""
    try:
        yield
    except ConfigError as exc:
        refused = str(exc)
    check_silent(refused)
    assert "\n" not in refused


@fuzzed(250)
@given(options(), st.sampled_from(CLASSES))
def test_options_are_accepted_or_refused_without_secrets(said: Any, cls: type[StoreConfig]) -> None:
    with refusing():
        config = parse(cls, said, PATH)
        check_silent(repr(config), str(config.for_log()), json.dumps(config.for_log(), default=str))
        check_silent(*config.warnings(PATH))
        config.store_id()
        assert config.call_timeout_s > 0
        open_integrity(config, PATH)
        if config.url.partition("://")[0] in OPENED:
            store = open_store(config, PATH)
            check_silent(repr(store))
            asyncio.run(store.close())


@fuzzed(100)
@given(options(), scalars)
def test_tier_options_are_accepted_or_refused_without_secrets(said: Any, epoch: Any) -> None:
    assume(isinstance(said, dict))
    with refusing():
        config = parse_tier(said | {"epoch": epoch}, PATH)
        check_silent(repr(config))


@st.composite
def arguments(draw: DrawFn) -> str:
    """Possible arguments of `ecshare doctor`."""
    said = draw(options())
    wrapped = draw(
        st.sampled_from(
            [
                said,
                {"ec_connector": "ECShareConnector", "ec_connector_extra_config": said},
                {"kv_connector": "KVShareConnector", "kv_connector_extra_config": said},
                {
                    "kv_connector": "MultiConnector",
                    "kv_connector_extra_config": {"connectors": [said]},
                },
            ]
        ).flatmap(mutated)
    )
    text = json.dumps(wrapped, ensure_ascii=draw(st.booleans()))
    match draw(st.integers(0, 9)):
        case 0:
            at = draw(st.integers(0, len(text)))
            odd = draw(st.sampled_from(["\x00", "{", "[", "]", ",", '"', "\ud800"]))
            text = text[:at] + odd + text[at + 1 :]
        case 1:
            text = '{"a":' * draw(st.sampled_from([400, 100_000]))
        case 2:
            text = "@" + draw(
                st.sampled_from(["/nowhere", "/dev/null", "/tmp", "\x00", "a" * 5000])
            )  # noqa: S108
        case 3:
            text = draw(st.sampled_from(ODD_TEXT))
    return text


def hides_under_no_secret_name(text: str) -> bool:
    """Return whether damage to `text` has renamed an option with a secret, such as to `{oken`:
    nobody can know then that it is one."""
    names = re.findall(rf'"([^"]*)": "{SECRET}"', text)
    return any(
        not re.search("(?i)key|secret|token|passw|passphrase|credential", each) for each in names
    )


@fuzzed(200)
@given(arguments())
def test_doctor_argument_is_parsed_or_refused_without_secrets(text: str) -> None:
    assume(not hides_under_no_secret_name(text))
    with refusing():
        subjects, strangers = read_argument(text)
        check_silent(*map(repr, subjects))
        assert all(isinstance(str(each), str) for each in strangers)
        assert subjects


ROUTER = ["--decoder", "--encoder", "--prefiller", "--port", "--host", "--max-body-mb"]
ROUTER += ["--max-items", "--hand-over", "--timeout-s", "--allow-media-network", "--nothing"]


@fuzzed(100)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(ROUTER), st.sampled_from([*ODD_TEXT, "http://a:1", "5", "::1/8"])
        ),
        max_size=4,
    )
)
def test_router_arguments_are_accepted_or_refused(given: list[tuple[str, str]]) -> None:
    line = [word for pair in given for word in pair]
    status = 0
    try:
        parse_arguments(["--decoder", "http://127.0.0.1:1", *line])
    except SystemExit as exc:
        status = int(exc.code or 0)
    assert status in (0, 2)


@fuzzed(200)
@given(
    st.text("abcXYZ019/+=@:?#%&", min_size=6, max_size=20),
    st.sampled_from(["", "user", "us@er", "AK"]),
    st.sampled_from(["s3", "sftp", "https", "abfs", "smb", "s3a"]),
    st.sampled_from(["host/x", "h:9/x@y", "bucket/a:b", "[::1]:80/"]),
)
def test_password_in_a_url_is_masked(secret: str, user: str, protocol: str, place: str) -> None:
    secret = f"<{secret}>"
    config = StoreConfig(url=f"{protocol}://{user}:{secret}@{place}")
    assert secret not in repr(config)
    assert secret not in str(config.for_log())


@fuzzed(100)
@given(
    st.sampled_from(NAMES), st.lists(st.sampled_from(["x", "list", "client_kwargs"]), max_size=4)
)
def test_secret_options_are_masked_at_any_depth(name: str, inside: list[str]) -> None:
    held: Any = {name: SECRET}
    for each in inside:
        held = [held, {"b": held}] if each == "list" else {each: held}
    config = StoreConfig(url="memory://x", storage_options={"a": held})
    check_silent(repr(config), str(config.for_log()))
