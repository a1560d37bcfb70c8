# SPDX-License-Identifier: Apache-2.0
"""Which addresses media may be fetched from."""

from ipaddress import ip_network

import pytest

from ecshare.router.media.hosts import may_connect


@pytest.mark.parametrize(
    "address",
    [
        "8.8.8.8",
        "2600:1::1",
        "::ffff:8.8.8.8",
        "64:ff9b::808:808",  # what a network of IPv6 alone calls 8.8.8.8
    ],
)
def test_public_addresses(address: str) -> None:
    assert may_connect(address, ())


@pytest.mark.parametrize(
    "address",
    [
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
    ],
)
def test_other_addresses_and_what_is_none(address: str) -> None:
    assert not may_connect(address, ())


def test_networks_can_be_allowed() -> None:
    allowed = ip_network("10.0.0.0/8"), ip_network("fd00::/8"), ip_network("127.0.0.1")
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::a01:203", "fd00::1", "127.0.0.1"):
        assert may_connect(address, allowed)
    for address in ("192.168.0.1", "127.0.0.2", "::1", "127.1", "::ffff:127.0.0.2"):
        assert not may_connect(address, allowed)
