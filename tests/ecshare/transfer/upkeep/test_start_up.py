# SPDX-License-Identifier: Apache-2.0
"""An engine starts without a temporarily unavailable store, but not with a wrong one."""

import errno
import logging
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ecshare.store.config import StoreConfig, parse
from ecshare.store.errors import ConfigError, StoreBusy, StoreUnavailable
from ecshare.store.folder.store import mapped_errors
from ecshare.store.keys import Key, Kind, manifest_key, namespace_digest
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Lookup, Outcome
from ecshare.transfer.upkeep import renewal
from ecshare.transfer.upkeep.renewal import Record
from tests.bad_s3.faults import always, in_turn, modes
from tests.bad_s3.server import Fault, Reply, Request, bad_s3, refused
from tests.waiting import wait_until

FACTS = {"model": "m"}
DIGEST = namespace_digest(FACTS)


def engine_at(endpoint: str, tmp_path: Path, **options: Any) -> TransferEngine:
    raw = {
        "url": "s3://bucket/cache",
        "storage_options": {"key": "k", "secret": "hidden", "endpoint_url": endpoint},
        "host_cache_dir": str(tmp_path / "host"),
        "io_timeout_s": 5,
        **options,
    }
    return TransferEngine(parse(StoreConfig, raw, "options"), "options")


def test_start_up_retries_temporary_failures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # obstore retries three times before it gives up.
    busy = modes("any:503")["any"]
    with bad_s3(in_turn(*[busy] * 7, lambda _: None, *[busy] * 4)) as server:
        engine = engine_at(server.endpoint, tmp_path)
        assert engine.probe(write=True) is True
        assert server.num_hits == 11
        engine.close()
    assert "does not serve now" not in caplog.text


@pytest.mark.parametrize(
    "mode", ["any:503", "any:409", "any:412", "any:304", "any:hang", "any:close", "put:full"]
)
def test_engine_starts_without_an_unavailable_store_and_uses_it_later(
    mode: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(renewal, "RETRY_S", 0.2)
    with bad_s3() as server, caplog.at_level(logging.WARNING):
        server.faults = modes(mode)
        engine = engine_at(server.endpoint, tmp_path, io_timeout_s=0.7)
        engine.start_up(Record(Kind.EC, DIGEST, FACTS), write=True)
        said = [each.getMessage() for each in caplog.records if "serve now" in each.getMessage()]
        assert len(said) == 1
        assert said[0].startswith("options.url: 's3://bucket/cache' does not serve now: ")
        assert "This engine starts without it" in said[0]
        server.faults = {}
        manifest = f"cache/{manifest_key(Kind.EC, DIGEST)}"
        wait_until(lambda: manifest in server.objects, otherwise="the manifest does not follow")

        def is_answered() -> bool:
            engine.submit(Lookup((Key("a" * 32),), 5))
            (done,) = engine.drain(10)
            return done.outcome is Outcome.OK

        wait_until(is_answered, otherwise="it does not ask the store again")
        engine.close()


def test_reader_starts_without_an_unavailable_store(tmp_path: Path) -> None:
    with bad_s3(modes("any:503")["any"]) as server:
        engine = engine_at(server.endpoint, tmp_path, io_timeout_s=0.5)
        engine.start_up(Record(Kind.EC, DIGEST, FACTS), write=False)
        engine.close()


PERMANENT = {
    "denied": refused(403, "AccessDenied"),
    "no bucket": refused(404, "NoSuchBucket"),
    "web page": Reply(404, b"<html>Not here</html>"),
    "moved": refused(301, "PermanentRedirect"),
    "no HTTP": Reply(200, raw=b"SSH-2.0-OpenSSH\r\n", then="close"),
}


@pytest.mark.parametrize("reply", PERMANENT.values(), ids=PERMANENT)
@pytest.mark.parametrize("write", [False, True])
def test_permanent_failure_is_refused_at_once(reply: Reply, tmp_path: Path, *, write: bool) -> None:
    with bad_s3(always(reply)) as server:
        engine = engine_at(server.endpoint, tmp_path, io_timeout_s=60)
        with pytest.raises(ConfigError, match=r"options\.url: 's3://bucket/cache' cannot be used"):
            engine.start_up(Record(Kind.EC, DIGEST, FACTS), write=write)
        engine.close()


THERE = {"x-amz-bucket-region": "eu-north-1"}


def redirected(request: Request) -> Reply:
    """Respond as S3 does for a new bucket of another region, which each response names."""
    location = {"Location": f"http://{request.headers['host']}{request.path}"}
    return replace(refused(307, "TemporaryRedirect"), headers=location | THERE)


# S3 sends no location for older buckets, and a refusal once obstore has followed a redirect, which
# it does without a signature.
OTHER_REGION = [redirected, always(Reply(301, b"", THERE)),
                always(replace(refused(403, "AccessDenied"), headers=THERE))]  # fmt: skip


@pytest.mark.parametrize("answer", OTHER_REGION, ids=["redirected", "moved", "followed"])
def test_config_error_names_the_buckets_region(answer: Fault, tmp_path: Path) -> None:
    with bad_s3(answer) as server:
        engine = engine_at(server.endpoint, tmp_path)
        with pytest.raises(ConfigError, match="in the region eu-north-1, and us-east-1 was asked"):
            engine.probe(write=True)
        engine.close()


@pytest.mark.parametrize("region", ["us-east-1", "a b; c", "", "y" * 50])
def test_same_or_malformed_region_is_not_named(region: str, tmp_path: Path) -> None:
    denied = replace(refused(403, "AccessDenied"), headers={"x-amz-bucket-region": region})
    with bad_s3(always(denied)) as server:
        engine = engine_at(server.endpoint, tmp_path)
        with pytest.raises(ConfigError, match="Check the url") as caught:
            engine.probe(write=True)
        assert "region" not in str(caught.value)
        assert f"the store at {server.endpoint} answered 403 AccessDenied" in str(caught.value)
        engine.close()


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_refused_connection_or_missing_tls_is_a_config_error(scheme: str, tmp_path: Path) -> None:
    with bad_s3() as server, socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1] if scheme == "http" else server.server_port
        closed.close()
        engine = engine_at(f"{scheme}://127.0.0.1:{port}", tmp_path)
        with pytest.raises(ConfigError, match="cannot be used") as caught:
            engine.probe(write=True)
        # A client's message may contain signed URLs.
        assert caught.value.__suppress_context__
        engine.close()


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, StoreBusy),
        (errno.EDQUOT, StoreBusy),
        (errno.ESTALE, StoreBusy),
        (errno.ENOTDIR, StoreUnavailable),
    ],
)
def test_full_disk_counts_as_temporary(number: int, kind: type[Exception]) -> None:
    with pytest.raises(StoreUnavailable) as caught, mapped_errors("a key"):
        raise OSError(number, os.strerror(number))
    assert type(caught.value) is kind


def test_engine_logs_a_literal_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with bad_s3() as server, caplog.at_level(logging.WARNING):
        engine = engine_at(server.endpoint, tmp_path)
        engine.start_up(Record(Kind.EC, DIGEST, FACTS), write=False)
        engine.close()
    assert "options.storage_options.secret: a secret is written into the configuration" in (
        caplog.text
    )
    assert "hidden" not in caplog.text
