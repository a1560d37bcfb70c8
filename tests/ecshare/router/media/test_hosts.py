# SPDX-License-Identifier: Apache-2.0
"""Which addresses media may be fetched from, and look-ups of the names that clients choose."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_network
from pathlib import Path

import pytest

from ecshare.router.media import hosts as names_module
from ecshare.router.media.hosts import MediaNames, may_connect
from ecshare.router.media.places import FullError, Places
from tests.ecshare.router.media.fake_names import SILENT, NameServer, name_server
from tests.waiting import until

# --- addresses ---


PUBLIC = (
    *("8.8.8.8", "2600:1::1", "::ffff:8.8.8.8"),
    "64:ff9b::808:808",  # what a network of IPv6 alone calls 8.8.8.8
)
OTHERS_AND_NONE = (
    *("127.0.0.1", "127.255.0.1", "::1"),  # loopback
    *("10.0.0.1", "172.16.0.1", "192.168.0.1", "fd00::1"),  # private
    *("169.254.169.254", "fe80::1", "fe80::1%eth0", "fec0::1"),  # link-local, site-local
    "100.64.0.1",  # behind a carrier's NAT
    *("224.0.0.1", "239.255.255.250", "ff02::1", "ff0e::1"),  # multicast
    *("0.0.0.0", "0.0.0.1", "::"),  # unspecified
    *("168.63.129.16", "192.0.0.9", "192.0.0.192"),  # of clouds: Azure's, Oracle's
    *("::ffff:168.63.129.16", "64:ff9b::a83f:8110", "2002:c000:c0::"),  # the same
    *("240.0.0.1", "255.255.255.255", "::7f00:1", "4000::1"),  # reserved
    *("192.0.2.1", "198.18.0.1", "2001:db8::1"),  # documentation, benchmarks
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1"),  # mapped
    *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::808:808"),  # NAT64
    *("2002:7f00:1::", "2002:a00:1::", "2002:a9fe:a9fe::1"),  # 6to4
    *("::7f00:1", "::127.0.0.1", "::8.8.8.8"),  # IPv4-compatible
    *("2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001::1"),  # Teredo
    *("127.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "127.0.0.1.", "localhost"),
    *("", "8.8.8.8 ", "[::1]", "a.example"),
)


@pytest.mark.parametrize("address", [*PUBLIC, *OTHERS_AND_NONE])
def test_only_public_addresses_may_be_fetched_from(address: str) -> None:
    assert may_connect(address, ()) is (address in PUBLIC)


def test_networks_can_be_allowed() -> None:
    allowed = ip_network("10.0.0.0/8"), ip_network("fd00::/8"), ip_network("127.0.0.1")
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::a01:203", "fd00::1", "127.0.0.1"):
        assert may_connect(address, allowed)
    for address in ("192.168.0.1", "127.0.0.2", "::1", "127.1", "::ffff:127.0.0.2"):
        assert not may_connect(address, allowed)


# --- look-ups ---

KNOWN = {"a.example": ["192.0.2.1", "192.0.2.2"], "no-address.example": []}


@asynccontextmanager
async def asking(number: int = 64) -> AsyncIterator[tuple[MediaNames, Places, NameServer]]:
    """A resolver with so many places, and the name server that it asks."""
    places = Places(number)
    async with name_server(KNOWN) as server:
        names = MediaNames(places, [server.address])
        yield names, places, server
        await names.close()


async def silent(names: MediaNames, server: NameServer, number: int) -> list[asyncio.Task[object]]:
    """Look up names of which the server says nothing; returns when it has been asked for all."""
    asked = [
        asyncio.create_task(names.resolve(f"h.{n}.x{n}.{SILENT}", 80, socket.AF_INET))
        for n in range(number)
    ]
    await until(lambda: len(set(server.asked)) >= number)
    return [*asked]


async def test_addresses_come_from_the_name_server_and_from_the_hosts_file() -> None:
    async with asking() as (names, places, _):
        found = await names.resolve("a.example", 80, socket.AF_UNSPEC)
        assert {each["host"] for each in found} == {"192.0.2.1", "192.0.2.2"}
        assert {(each["port"], each["family"]) for each in found} == {(80, socket.AF_INET)}
        assert "127.0.0.1" in {each["host"] for each in await names.resolve("localhost")}
        assert places.num_used == 0


@pytest.mark.parametrize(
    "name", ["b.example", "no-address.example", "a" * 64 + ".example", "a." * 200, "\udcff.example"]
)
async def test_what_has_no_address_is_an_error_of_the_system(name: str) -> None:
    async with asking() as (names, places, _):
        with pytest.raises(OSError, match=r"\w"):
            await names.resolve(name)
        assert places.num_used == 0


async def test_silent_names_hold_one_thread_and_no_other_name_up() -> None:
    async with asking(4096) as (names, _, server):
        await names.resolve("a.example")
        before = num_threads()
        asked = await silent(names, server, 64)
        assert await names.resolve("a.example")
        assert not any(each.done() for each in asked)
        assert num_threads() <= before
        for each in asked:
            each.cancel()


def num_threads() -> int:
    """Count those of C libraries, too."""
    return len(list(Path("/proc/self/task").iterdir()))


async def test_silent_names_end_and_give_their_places_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names_module, "_FIRST_TRY_S", 0.01)
    async with asking() as (names, places, server):
        results = await asyncio.gather(*await silent(names, server, 8), return_exceptions=True)
        assert {type(each) for each in results} == {OSError}
        assert places.num_used == 0


async def test_a_look_up_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names_module, "_LIMIT_S", 0.01)
    async with asking() as (names, places, _):
        with pytest.raises(TimeoutError):
            await names.resolve(f"a.{SILENT}")
        assert places.num_used == 1, "the question is still asked"


async def test_a_look_up_beyond_the_bound_is_refused() -> None:
    """All silent names are of one zone, which then has as many places as are free."""
    async with asking(4) as (names, places, server):
        asked = [asyncio.create_task(names.resolve(f"h.{zone}.{SILENT}")) for zone in "ab"]
        await until(lambda: len(set(server.asked)) >= 2)
        with pytest.raises(FullError):
            await names.resolve(f"c.{SILENT}")
        assert await names.resolve("a.example")
        for each in asked:
            each.cancel()


async def test_answers_are_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asking() as (names, _, server):
        for _ in range(3):
            await names.resolve("a.example")
        assert server.asked == ["a.example"]
    monkeypatch.setattr(names_module, "_MAX_AGE_S", 0.0)
    async with asking() as (names, _, server):
        for _ in range(3):
            await names.resolve("a.example")
        assert server.asked == ["a.example"] * 3


async def test_a_channel_that_is_replaced_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a question that it was asked before, and that takes longer."""
    monkeypatch.setattr(names_module, "_MAX_LOOKUPS", 1)
    monkeypatch.setattr(names_module, "_FIRST_TRY_S", 0.01)
    async with asking() as (names, places, server):
        (asked,) = await silent(names, server, 1)
        for _ in range(3):
            assert await names.resolve("a.example")
        assert server.asked.count("a.example") == 3, "no channel has an answer of another"
        with pytest.raises(OSError, match="Timeout"):
            await asked
        await until(lambda: places.num_used == 0)


async def test_answers_that_come_after_the_end_are_dropped() -> None:
    """c-ares ends what is asked in a thread of its own, perhaps when the loop has ended."""
    async with asking() as (names, places, server):
        await silent(names, server, 1)
        await names.close()
        await until(lambda: places.num_used == 0)
