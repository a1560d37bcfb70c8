# SPDX-License-Identifier: Apache-2.0
"""Which addresses media may be fetched from. Pure: it resolves no names."""

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from ecshare.router.options.values import Network

_NAT64 = IPv6Network("64:ff9b::/96")
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_OF_CLOUDS = IPv4Network("168.63.129.16/32"), IPv4Network("192.0.0.0/24")
"""Answered within a cloud alone, although Python calls them global: the agent of Azure's hosts, and
protocol assignments, where Oracle had its metadata."""
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*")


def may_connect(text: str, allowed: Iterable[Network]) -> bool:
    """Tell whether an address is public or in one of the allowed networks.

    `text` is a numeric address as sockets report it. Anything else is refused, including other
    spellings of an address, such as 127.1.
    """
    try:
        address = _target(ip_address(text))
    except ValueError:
        return False
    return _is_public(address) or any(address in network for network in allowed)


def is_name(host: str) -> bool:
    """Tell whether a host is a name; else it is an address, in this spelling or another one."""
    last = host.rstrip(".").rpartition(".")[2]
    return ":" not in host and not _NUMBER.fullmatch(last)


def _target(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """Return the IPv4 address that an IPv6 address translates or tunnels to, else the address."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    # is_global is true for multicast and, in some Python versions, for unassigned IPv6 ranges.
    if not address.is_global or address.is_multicast:
        return False
    if isinstance(address, IPv6Address):
        return address in _GLOBAL_UNICAST
    return not any(address in network for network in _OF_CLOUDS)
