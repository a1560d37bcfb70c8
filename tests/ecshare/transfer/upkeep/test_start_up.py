# SPDX-License-Identifier: Apache-2.0
"""An engine starts without a temporarily unavailable store, but not with a wrong one."""

import errno
import logging
import os
import socket
import threading
from collections.abc import Callable
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
from tests.ecshare.store.scripted import DATED, Asked, serving
from tests.waiting import wait_until

FACTS = {"model": "m"}
DIGEST = namespace_digest(FACTS)
Answer = Callable[[Asked], None]


def engine_at(endpoint: str, tmp_path: Path, **options: Any) -> TransferEngine:
    raw = {
        "url": "s3://bucket/cache",
        "storage_options": {"key": "k", "secret": "hidden", "endpoint_url": endpoint},
        "host_cache_dir": str(tmp_path / "host"),
        "io_timeout_s": 5,
        **options,
    }
    return TransferEngine(parse(StoreConfig, raw, "options"), "options")


def well(asked: Asked) -> None:
    if asked.command == "GET" and "list-type" in asked.path:
        asked.say(200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
    elif asked.command in ("GET", "HEAD") and "probe" not in asked.path:
        asked.say_error(404, "NoSuchKey")
    else:
        asked.say(200, b"ecshare", etag='"e"', **DATED)


def busy(asked: Asked) -> None:
    asked.say_error(503, "SlowDown")


def full(asked: Asked) -> None:
    if asked.command == "PUT":
        asked.say_error(507, "InsufficientStorage")
    else:
        well(asked)


def conflict(asked: Asked) -> None:
    asked.say_error(409, "OperationAborted")


def unmet(asked: Asked) -> None:
    asked.say_error(412, "PreconditionFailed")


def unchanged(asked: Asked) -> None:
    asked.say(304)


def breaks_off(asked: Asked) -> None:
    asked.close_connection = True


def hangs(asked: Asked) -> None:
    # Until the client hangs up.
    asked.connection.recv(1)
    asked.close_connection = True


def test_start_up_retries_temporary_failures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # obstore retries three times before it gives up.
    answers: list[Answer] = [*[busy] * 7, well, *[busy] * 4]
    with serving(lambda asked: (answers.pop(0) if answers else well)(asked)) as server:
        engine = engine_at(server.endpoint, tmp_path)
        assert engine.probe(write=True) is True
        assert not answers
        engine.close()
    assert "does not serve now" not in caplog.text


@pytest.mark.parametrize("answer", [busy, conflict, unmet, unchanged, hangs, breaks_off, full])
def test_engine_starts_without_an_unavailable_store_and_uses_it_later(
    answer: Answer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(renewal, "RETRY_S", 0.2)
    answers, written = [answer], threading.Event()

    def serve(asked: Asked) -> None:
        if answers[0] is well and manifest_key(Kind.EC, DIGEST) in asked.path:
            written.set()
        answers[0](asked)

    with serving(serve) as server, caplog.at_level(logging.WARNING):
        engine = engine_at(server.endpoint, tmp_path, io_timeout_s=0.7)
        engine.start_up(Kind.EC, DIGEST, FACTS, write=True)
        said = [each.getMessage() for each in caplog.records if "serve now" in each.getMessage()]
        assert len(said) == 1
        assert said[0].startswith("options.url: 's3://bucket/cache' does not serve now: ")
        assert "This engine starts without it" in said[0]
        answers[0] = well
        assert written.wait(20), "the manifest follows"

        def is_answered() -> bool:
            engine.submit(Lookup((Key("a" * 32),), 5))
            (done,) = engine.drain(10)
            return done.outcome is Outcome.OK

        wait_until(is_answered, otherwise="it does not ask the store again")
        engine.close()


def test_reader_starts_without_an_unavailable_store(tmp_path: Path) -> None:
    with serving(busy) as server:
        engine = engine_at(server.endpoint, tmp_path, io_timeout_s=0.5)
        engine.start_up(Kind.EC, DIGEST, FACTS, write=False)
        engine.close()


def denied(asked: Asked) -> None:
    asked.say_error(403, "AccessDenied")


def no_bucket(asked: Asked) -> None:
    asked.say_error(404, "NoSuchBucket")


def web_page(asked: Asked) -> None:
    asked.say(404, b"<html>Not here</html>")


def moved(asked: Asked) -> None:
    asked.say_error(301, "PermanentRedirect")


def no_http(asked: Asked) -> None:
    asked.wfile.write(b"SSH-2.0-OpenSSH\r\n")
    asked.close_connection = True


@pytest.mark.parametrize("answer", [denied, no_bucket, web_page, moved, no_http])
@pytest.mark.parametrize("write", [False, True])
def test_permanent_failure_is_refused_at_once(
    answer: Answer, tmp_path: Path, *, write: bool
) -> None:
    with serving(answer) as server:
        engine = engine_at(server.endpoint, tmp_path, io_timeout_s=60)
        with pytest.raises(ConfigError, match=r"options\.url: 's3://bucket/cache' cannot be used"):
            engine.start_up(Kind.EC, DIGEST, FACTS, write=write)
        engine.close()


def redirected(asked: Asked) -> None:
    """Respond as S3 does for a new bucket of another region, which each response names."""
    body = b"<Error><Code>TemporaryRedirect</Code><Message>Go there.</Message></Error>"
    there = f"http://{asked.headers['host']}{asked.path}"
    asked.say(307, body, location=there, x_amz_bucket_region="eu-north-1")


def moved_for_good(asked: Asked) -> None:
    """Respond as S3 does for older buckets: without a location."""
    asked.say(301, b"", x_amz_bucket_region="eu-north-1")


def followed(asked: Asked) -> None:
    """Respond as S3 does after obstore has followed a redirect without a signature."""
    asked.say(403, b"<Error><Code>AccessDenied</Code></Error>", x_amz_bucket_region="eu-north-1")


@pytest.mark.parametrize("answer", [redirected, moved_for_good, followed])
def test_config_error_names_the_buckets_region(answer: Answer, tmp_path: Path) -> None:
    with serving(answer) as server:
        engine = engine_at(server.endpoint, tmp_path)
        with pytest.raises(ConfigError, match="in the region eu-north-1, and us-east-1 was asked"):
            engine.probe(write=True)
        engine.close()


@pytest.mark.parametrize("region", ["us-east-1", "a b; c", "", "y" * 50])
def test_same_or_malformed_region_is_not_named(region: str, tmp_path: Path) -> None:
    def answer(asked: Asked) -> None:
        asked.say(403, b"<Error><Code>AccessDenied</Code></Error>", x_amz_bucket_region=region)

    with serving(answer) as server:
        engine = engine_at(server.endpoint, tmp_path)
        with pytest.raises(ConfigError, match="Check the url") as caught:
            engine.probe(write=True)
        assert "region" not in str(caught.value)
        assert f"the store at {server.endpoint} answered 403 AccessDenied" in str(caught.value)
        engine.close()


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_refused_connection_or_missing_tls_is_a_config_error(scheme: str, tmp_path: Path) -> None:
    with serving(well) as server, socket.create_server(("127.0.0.1", 0)) as closed:
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
    with serving(well) as server, caplog.at_level(logging.WARNING):
        engine = engine_at(server.endpoint, tmp_path)
        engine.start_up(Kind.EC, DIGEST, FACTS, write=False)
        engine.close()
    assert "options.storage_options.secret: a secret is written into the configuration" in (
        caplog.text
    )
    assert "hidden" not in caplog.text
