# SPDX-License-Identifier: Apache-2.0
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ecshare.store.cloud.plan import CloudPlan, plan
from ecshare.store.cloud_accounts import s3_endpoint
from ecshare.store.config import StoreConfig
from ecshare.store.errors import ConfigError

PATH = "ec_connector_extra_config"
KEYS = {"key": "k", "secret": "s"}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove all credentials, and disable the network lookup of them."""
    for name in os.environ:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def planned(url: str = "s3://bucket/a/prefix/", **options: Any) -> CloudPlan:
    found = plan(StoreConfig(url=url, storage_options=options), PATH)
    assert isinstance(found, CloudPlan), found
    return found


def refusal(url: str = "s3://bucket", **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(StoreConfig(url=url, storage_options=options), PATH)
    return str(caught.value)


def credentials(found: CloudPlan) -> tuple[Any, ...]:
    assert found.credentials is not None
    given = found.credentials()
    return given["access_key_id"], given["secret_access_key"], given["token"]


def test_default_options_use_aws() -> None:
    found = planned(**KEYS)
    assert (found.bucket, found.prefix) == ("bucket", "a/prefix")
    assert credentials(found) == ("k", "s", None)
    assert found.client == {"allow_http": False}
    assert found.config == {
        "region": "us-east-1",
        "skip_signature": False,
        "unsigned_payload": True,  # TLS protects it
        "virtual_hosted_style_request": True,
    }


def test_custom_endpoint_uses_path_style_requests() -> None:
    found = planned(**KEYS, token="t", endpoint_url="https://minio:9000/")
    assert credentials(found) == ("k", "s", "t")
    assert found.config["aws_endpoint_url_s3"] == "https://minio:9000"
    assert found.config["virtual_hosted_style_request"] is False


SAME = [
    {
        **KEYS,
        "token": "t",
        "client_kwargs": {"endpoint_url": "http://minio", "region_name": "r", "verify": False},
        "config_kwargs": {"s3": {"addressing_style": "virtual"}},
        "requester_pays": True,
        "anon": None,
    },
    {
        "access_key_id": "k",
        "secret_access_key": "s",
        "session_token": "t",
        "endpoint": "http://bucket.minio",  # as obstore wants it
        "region": "r",
        "verify": False,
        "virtual_hosted_style_request": True,
        "request_payer": True,
    },
    {
        "aws_access_key_id": "k",
        "aws_secret_access_key": "s",
        "aws_session_token": "t",
        "aws_endpoint_url": "http://minio",
        "endpoint_url": "http://minio",
        "aws_region": "r",
        "verify": False,
        "aws_virtual_hosted_style_request": True,
        "aws_request_payer": True,
    },
]


@pytest.mark.parametrize("options", SAME)
def test_s3fs_and_obstore_option_names_are_equivalent(options: dict[str, Any]) -> None:
    found = planned(**options)
    assert credentials(found) == ("k", "s", "t")
    assert found.client == {"allow_http": True, "allow_invalid_certificates": True}
    assert found.config == {
        "aws_endpoint_url_s3": "http://bucket.minio",
        "region": "r",
        "request_payer": True,
        "skip_signature": False,
        "unsigned_payload": False,
        "virtual_hosted_style_request": True,
    }


@pytest.mark.parametrize(
    ("endpoint", "unsigned"),
    [
        ("https://minio", True),
        ("http://127.0.0.1:9000", True),
        ("http://127.8.9.1:9000", True),
        ("http://[::1]:9000", True),
        ("http://localhost:9000", True),
        ("http://10.0.0.1:9000", False),
        ("http://minio:9000", False),
        ("http://localhost.evil.com", False),
        ("http://127.0.0.1.evil.com", False),
    ],
)
def test_payload_is_unsigned_only_over_tls_or_loopback(endpoint: str, unsigned: bool) -> None:
    assert planned(**KEYS, endpoint_url=endpoint).config["unsigned_payload"] is unsigned


@pytest.mark.parametrize("unsigned", [False, True])
def test_unsigned_payload_option_overrides_the_default(unsigned: bool) -> None:
    for endpoint in ("http://minio", "https://minio"):
        config = planned(**KEYS, endpoint=endpoint, unsigned_payload=unsigned).config
        assert config["unsigned_payload"] is unsigned


def test_bucket_with_dots_uses_path_style_requests() -> None:
    assert not planned("s3://my.bucket", **KEYS).config["virtual_hosted_style_request"]


def test_anonymous_needs_no_credentials() -> None:
    found = planned(anon=True)
    assert found.credentials is None
    assert found.config["skip_signature"] is True


def test_environment_variables_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ek")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "es")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "et")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-north-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://from.env")
    found = planned()
    assert credentials(found) == ("ek", "es", "et")
    assert found.config["region"] == "eu-north-1"
    assert found.config["aws_endpoint_url_s3"] == "https://from.env"


def test_options_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ek")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "es")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "et")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://from.env")
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    found = planned(**KEYS, endpoint_url="https://minio", client_kwargs={"region_name": "r"})
    assert credentials(found) == ("k", "s", None)
    assert found.config["aws_endpoint_url_s3"] == "https://minio"
    assert found.config["region"] == "r"


def test_profile_is_read_from_aws_config_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = dk\naws_secret_access_key = ds\n"
        "[team]\naws_access_key_id = tk\naws_secret_access_key = ts\n"
    )
    (tmp_path / "config").write_text(
        "[profile team]\nregion = eu-west-3\nendpoint_url = https://team.store\n"
    )
    assert credentials(planned()) == ("dk", "ds", None)
    for found in (planned(profile="team"), _with_env(monkeypatch, "AWS_PROFILE", "team")):
        assert credentials(found) == ("tk", "ts", None)
        assert found.config["region"] == "eu-west-3"
        assert found.config["aws_endpoint_url_s3"] == "https://team.store"


SERVICES = """[profile team]
services = ours
endpoint_url = https://all.services
aws_access_key_id = tk
aws_secret_access_key = ts
[services ours]
dynamodb =
  endpoint_url = https://not.s3
s3 =
  endpoint_url = https://s3.ours
"""


def test_profile_may_refer_to_a_services_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text(SERVICES)
    assert planned(profile="team").config["aws_endpoint_url_s3"] == "https://s3.ours"
    (tmp_path / "config").write_text(SERVICES.replace("s3 =", "iam ="))
    assert planned(profile="team").config["aws_endpoint_url_s3"] == "https://all.services"
    (tmp_path / "config").write_text(SERVICES.replace("[services ours]", "[services theirs]"))
    assert "there is no section [services ours]" in refusal(profile="team")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://from.env")
    assert planned(profile="team").config["aws_endpoint_url_s3"] == "https://from.env"


@pytest.mark.parametrize("by_profile", [False, True])
def test_configured_endpoints_can_be_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_profile: bool
) -> None:
    """Also for obstore, which reads the environment itself."""
    text = SERVICES
    if by_profile:
        text = text.replace("services = ours", "ignore_configured_endpoint_urls = true")
    else:
        monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://from.env")
    amazon = "https://bucket.s3.us-east-1.amazonaws.com"
    assert planned(profile="team").config["aws_endpoint_url_s3"] == amazon
    written = planned(profile="team", endpoint_url="https://minio")
    assert written.config["aws_endpoint_url_s3"] == "https://minio"
    if not by_profile:
        assert planned(**KEYS).config["aws_endpoint_url_s3"] == amazon
        assert s3_endpoint() == ""


def _with_env(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> CloudPlan:
    monkeypatch.setenv(name, value)
    return planned()


def test_missing_credentials_are_one_sentence() -> None:
    sentence = refusal()
    assert sentence.startswith(f"{PATH}.storage_options: no S3 credentials; set AWS_ACCESS_KEY_ID")
    assert refusal(profile="nobody").startswith(f"{PATH}.storage_options: no S3 credentials: ")


def test_profile_needs_botocore(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("botocore", "botocore.exceptions", "botocore.session"):
        monkeypatch.setitem(sys.modules, module, None)
    assert refusal(profile="team") == (
        f"{PATH}.storage_options.profile: needs botocore: "
        "pip install botocore (ecshare's extra [s3])"
    )
    assert planned().credentials is None  # obstore searches by itself


def test_key_without_secret_is_refused() -> None:
    assert refusal(access_key_id="k").startswith(f"{PATH}.storage_options.secret: missing")
    assert refusal(key="k").startswith(f"{PATH}.storage_options.secret: missing")
    assert refusal(secret="s").startswith(f"{PATH}.storage_options.key: missing")


def test_certificates_are_read_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pem = b"-----BEGIN CERTIFICATE-----\nMA==\n-----END CERTIFICATE-----\n"
    (tmp_path / "ca.pem").write_bytes(pem)
    found = planned(**KEYS, client_kwargs={"verify": str(tmp_path / "ca.pem")})
    assert found.client["root_certificate"] == pem
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.pem"))
    assert planned(**KEYS).client["root_certificate"] == pem
    with (tmp_path / "ca.pem").open("ab") as file:
        file.truncate(5 << 20)
    assert refusal(**KEYS).endswith("at most 4,194,304 bytes")
    monkeypatch.setenv("AWS_CA_BUNDLE", "/nowhere")
    assert refusal(**KEYS).startswith("AWS_CA_BUNDLE: no certificates")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"s3_additional_kwargs": {"ACL": "private"}}, "s3_additional_kwargs"),
        ({"session": object()}, "session"),
        ({"default_block_size": 5}, "default_block_size"),
        ({"client_kwargs": {"use_ssl": False}}, "client_kwargs.use_ssl"),
        ({"config_kwargs": {"proxies": {}}}, "config_kwargs.proxies"),
        ({"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}}, "config_kwargs.s3.use_acc"),
        ({"config_kwargs": {"signature_version": "s3"}}, "config_kwargs.signature_version"),
    ],
)
def test_options_only_s3fs_knows_select_fsspec(options: dict[str, Any], reason: str) -> None:
    found = plan(StoreConfig(url="s3://bucket", storage_options={**KEYS, **options}), PATH)
    assert isinstance(found, str)
    assert f"obstore has no option {reason}" in found


def test_prefix_that_obstore_would_encode_selects_fsspec() -> None:
    found = plan(StoreConfig(url="s3://bucket/a b*c", storage_options=KEYS), PATH)
    assert found == "the prefix has characters that obstore would encode"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"endpont_url": "x"}, ".endpont_url: unknown option; did you mean 'endpoint_url'?"),
        ({"regin": "x"}, ".regin: unknown option; did you mean 'region'?"),
        ({"access_key_id": "other"}, ".access_key_id: contradicts key; leave one out"),
        ({"region": 1}, ".region: expected a string, got int"),
        ({"unsigned_payload": "true"}, ".unsigned_payload: expected true or false, got str"),
        ({"endpoint": "minio:9000"}, ".endpoint: 'minio:9000' is no endpoint"),
        ({"key": 3, "secret": "s"}, ".key: expected a string, got int"),
        ({"key": "", "secret": "s"}, ".key: is empty; leave it out, or fill it in"),
        ({"anon": "yes"}, ".anon: expected true or false, got str"),
        ({"client_kwargs": "x"}, ".client_kwargs: expected an object, got str"),
        ({"client_kwargs": {"region_name": 1}}, ".client_kwargs.region_name: expected a string"),
        ({"config_kwargs": {"s3": 1}}, ".config_kwargs.s3: expected an object, got int"),
        (
            {"config_kwargs": {"s3": {"addressing_style": "x"}}},
            ".config_kwargs.s3.addressing_style: w",
        ),
        ({"endpoint_url": "minio:9000"}, ".endpoint_url: 'minio:9000' is no endpoint"),
        ({"endpoint_url": "ftp://minio"}, ".endpoint_url: 'ftp://minio' is no endpoint"),
        ({"client_kwargs": {"verify": "/nowhere"}}, ".client_kwargs.verify: no certificates"),
        ({"client_kwargs": {"verify": "/dev/zero"}}, ".client_kwargs.verify: no certificates"),
        ({"verify": "a\0b"}, ".verify: no certificates can be read from 'a"),
    ],
)
def test_wrong_option_is_named(options: dict[str, Any], sentence: str) -> None:
    assert refusal(**{**KEYS, **options}).startswith(f"{PATH}.storage_options{sentence}")


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///x", "s3://b", "s3://key:secret@bucket", "s3://a b"]
)
def test_url_without_a_bucket_is_refused(url: str) -> None:
    assert refusal(url, **KEYS).startswith(f"{PATH}.url: ")


@pytest.mark.parametrize("url", ["s3://key:hidden@bucket/x", "s3://key:hid/hidden@bucket/x"])
def test_refusal_contains_no_secret_of_a_url(url: str) -> None:
    assert "hidden" not in refusal(url, **KEYS)
    assert "hidden" not in refusal(**KEYS, endpoint_url="ftp://key:hidden@minio")


@pytest.mark.parametrize("url", ["s3://bucket/a//b", "s3://bucket/../x", "s3://bucket/./x"])
def test_prefix_with_an_empty_or_dotted_level_is_refused(url: str) -> None:
    assert "empty or dotted level" in refusal(url, **KEYS)


def test_secrets_are_not_in_the_plans_repr() -> None:
    assert "hidden" not in repr(planned(key="hidden1", secret="hidden2", token="hidden3"))
