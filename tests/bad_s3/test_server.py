# SPDX-License-Identifier: Apache-2.0
"""The tests' S3 server does what its faults say."""

import http.client
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType

import pytest

from tests.bad_s3.faults import always, cut_at, in_turn, late, modes, on, storing, upload_cut_at
from tests.bad_s3.server import BUCKET, BadS3, Reply, Stored, bad_s3, refused
from tests.waiting import wait_until

BODY = bytes(range(256)) * 1024
FAR_S = 3600.0
Client = http.client.HTTPConnection


@pytest.fixture
def server() -> Iterator[BadS3]:
    with bad_s3() as server:
        server.objects["one"] = Stored.of(BODY)
        yield server


@pytest.fixture
def client(server: BadS3) -> Iterator[Client]:
    client = Client(server.endpoint.removeprefix("http://"), timeout=20)
    yield client
    client.close()


def ask(
    client: Client,
    method: str = "GET",
    key: str = "one",
    body: bytes | None = None,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int, bytes]:
    client.request(method, f"/{BUCKET}/{key}", body, headers)
    with client.getresponse() as answer:
        return answer.status, answer.read()


def check_silent(client: Client) -> None:
    """Check that the server sends nothing for a while."""
    client.sock.settimeout(0.1)
    with pytest.raises(TimeoutError):
        client.sock.recv(1)
    client.sock.settimeout(20)


def test_requests_of_one_connection_are_answered_as_s3_does(client: Client, server: BadS3) -> None:
    assert ask(client) == (200, BODY)
    assert ask(client, "HEAD") == (200, b"")
    assert ask(client, headers={"Range": "bytes=5-9"}) == (206, BODY[5:10])
    assert ask(client, headers={"Range": f"bytes={len(BODY)}-{len(BODY) + 9}"})[0] == 416
    assert ask(client, "PUT", "two", b"2")[0] == 200
    assert ask(client, "PUT", "two", b"3", {"If-None-Match": "*"})[0] == 412
    assert ask(client, key="two") == (200, b"2")
    assert ask(client, "DELETE", "two")[0] == 204
    assert ask(client, key="two")[0] == 404
    assert server.deleted == {"two"}
    assert len(server.requests) == 9
    assert server.num_hits == 0


def test_client_gets_100_continue(client: Client, server: BadS3) -> None:
    client.putrequest("PUT", f"/{BUCKET}/two")
    client.putheader("Content-Length", str(len(BODY)))
    client.putheader("Expect", "100-continue")
    client.endheaders()
    assert client.sock.recv(100).startswith(b"HTTP/1.1 100 ")
    client.send(BODY)
    with client.getresponse() as answer:
        assert answer.status == 200
    assert server.objects["two"].body == BODY


def test_objects_are_listed_in_pages(client: Client, server: BadS3) -> None:
    server.page = 2
    server.objects = {f"a/{n}": Stored.of(b"x") for n in range(3)} | {"b": Stored.of(b"")}
    first = ask(client, key="?list-type=2&prefix=a/")[1]
    assert first.count(b"<Key>") == 2
    assert b"<NextContinuationToken>a/1</NextContinuationToken>" in first
    last = ask(client, key="?list-type=2&prefix=a/&continuation-token=a/1")[1]
    assert last.count(b"<Key>a/2</Key>") == last.count(b"<Key>") == 1
    assert b"<IsTruncated>false" in last


@pytest.mark.parametrize(("minutes", "status"), [(5, 200), (-5, 200), (60, 403), (-60, 403)])
def test_signature_of_another_time_is_refused(client: Client, minutes: int, status: int) -> None:
    signed = datetime.now(UTC) + timedelta(minutes=minutes)
    headers = {"x-amz-date": signed.strftime("%Y%m%dT%H%M%SZ")}
    assert ask(client, headers=headers)[0] == status


@pytest.mark.parametrize("method", ["GET", "PUT", "HEAD", "DELETE"])
def test_refused_request_has_no_effect(client: Client, server: BadS3, method: str) -> None:
    body = b"another" if method == "PUT" else None
    server.faults = modes("any:503")
    for _ in range(2):  # the connection stays usable
        status, said = ask(client, method, body=body)
        assert status == 503
        assert method == "HEAD" or b"<Code>SlowDown</Code>" in said
    assert server.num_hits == 2
    assert server.objects["one"].body == BODY
    server.faults = {}
    assert ask(client, method, body=body)[0] < 300


def test_fault_affects_only_its_verb_and_keys(client: Client, server: BadS3) -> None:
    server.faults = {"get": on("poor", always(refused(403, "AccessDenied")))} | modes("any:500")
    assert ask(client)[0] == 200
    assert ask(client, key="poor")[0] == 403
    assert ask(client, "HEAD")[0] == 500
    assert server.num_hits == 2


def test_faults_in_turn_end(client: Client, server: BadS3) -> None:
    server.faults = {"any": in_turn(always(Reply(500)), lambda _: None, always(Reply(503)))}
    assert [ask(client)[0] for _ in range(4)] == [500, 200, 503, 200]


def test_late_answer_comes_when_the_fault_ends(client: Client, server: BadS3) -> None:
    server.faults = {"put": late(FAR_S)}
    client.request("PUT", f"/{BUCKET}/two", b"2")
    server.wait_hit()
    assert "two" in server.objects, "the request was carried out"
    check_silent(client)
    server.faults = {}
    with client.getresponse() as answer:
        assert answer.status == 200


def test_late_answer_comes_in_time(client: Client, server: BadS3) -> None:
    server.faults = {"get": late(0.1)}
    begun_s = time.monotonic()
    assert ask(client) == (200, BODY)
    assert time.monotonic() - begun_s >= 0.1


def test_cut_answer_states_the_whole_length(client: Client, server: BadS3) -> None:
    server.faults = {"get": cut_at(100_000, "close")}
    client.request("GET", f"/{BUCKET}/one")
    with client.getresponse() as answer, pytest.raises(http.client.IncompleteRead) as short:
        answer.read()
    assert short.value.partial == BODY[:100_000]
    assert answer.getheader("Content-Length") == str(len(BODY))


def test_reset_answer_resets_the_connection(client: Client, server: BadS3) -> None:
    server.faults = {"get": cut_at(1000, "reset")}
    client.request("GET", f"/{BUCKET}/one")
    with pytest.raises(ConnectionResetError), client.getresponse() as answer:
        answer.read()


def test_stalled_answer_ends_with_the_fault(client: Client, server: BadS3) -> None:
    server.faults = {"get": cut_at(1000, "hang")}
    client.request("GET", f"/{BUCKET}/one")
    with client.getresponse() as answer:
        assert answer.read(1000) == BODY[:1000]
        check_silent(client)
        server.faults = {}
        with pytest.raises(http.client.IncompleteRead):
            answer.read()


@pytest.mark.parametrize("then", ["close", "reset"])
def test_cut_upload_is_not_stored(client: Client, server: BadS3, then: str) -> None:
    server.faults = {"put": upload_cut_at(1000, then)}  # type: ignore[arg-type]
    with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
        ask(client, "PUT", "two", BODY)
    server.wait_hit()
    assert "two" not in server.objects


def test_stalled_upload_is_lost_when_disconnected(client: Client, server: BadS3) -> None:
    server.faults = {"put": upload_cut_at(1000, "hang")}
    client.request("PUT", f"/{BUCKET}/two", BODY)
    server.wait_hit()
    check_silent(client)
    server.disconnect()
    with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
        client.getresponse()
    client.close()
    assert "two" not in server.objects
    assert ask(client, "PUT", "two", BODY)[0] == 200


def test_body_shorter_than_the_cut_is_unchanged(client: Client, server: BadS3) -> None:
    at_byte = len(BODY)
    server.faults = {"get": cut_at(at_byte, "close"), "put": upload_cut_at(at_byte, "close")}
    assert ask(client) == (200, BODY)
    assert ask(client, "PUT", "two", BODY)[0] == 200
    assert server.num_hits == 0


def test_flipped_bit_is_the_only_change(client: Client, server: BadS3) -> None:
    server.faults = modes("get:flipped-anywhere")
    got = ask(client)[1]
    assert [a ^ b for a, b in zip(got, BODY, strict=True) if a != b] == [4]
    server.faults = {"put": storing(bytes.swapcase)}
    ask(client, "PUT", "two", b"Body")
    assert server.objects["two"].body == b"bODY"


def test_server_refuses_connections_until_the_block_ends(client: Client, server: BadS3) -> None:
    server.faults = modes("get:hang")
    client.request("GET", f"/{BUCKET}/one")
    server.wait_hit()
    with server.refusing():
        with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
            client.getresponse()
        client.close()
        with pytest.raises(ConnectionRefusedError):
            ask(client)
        client.close()
    assert ask(client) == (200, BODY)


def test_wait_hit_fails_without_a_hit(server: BadS3) -> None:
    with pytest.raises(AssertionError, match="no fault was met"):
        server.wait_hit(0.01)


def test_closed_connections_are_forgotten(client: Client, server: BadS3) -> None:
    ask(client)
    assert len(server.open) == 1
    client.close()
    wait_until(lambda: not server.open)
