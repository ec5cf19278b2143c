"""Connections to public addresses only.

A name is resolved, every address it has is checked, and the connection goes to the address that was checked: a name
that resolves differently a moment later (DNS rebinding) gains nothing. Whatever way of writing an address is missed
here is caught where the socket is made.
"""

from __future__ import annotations

import ipaddress
import socket

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class PrivateAddress(Exception):
    """A host is, or resolves to, an address that is not public."""


def is_public(text: str) -> bool:
    """Whether an IP address is reachable from everywhere; one that holds an IPv4 address counts as that one."""
    address = _inner(ipaddress.ip_address(text.partition("%")[0]))
    special = address.is_multicast or address.is_reserved or getattr(address, "is_site_local", False)
    return address.is_global and not special


def check_host(host: str) -> None:
    """Raise :class:`PrivateAddress` for a host written as an IP address that is not public. Names pass.

    Sockets also take an IPv4 address as one number or in other bases (``2130706433``, ``0x7f.1``).
    """
    try:
        text = host if ":" in host else socket.inet_ntoa(socket.inet_aton(host))
        public = is_public(text)
    except (OSError, ValueError):
        return
    if not public:
        raise PrivateAddress(host)


def public_socket(info: aiohttp.AddrInfoType) -> socket.socket:
    """A socket for an address that a connector is about to connect to. Raises :class:`PrivateAddress`."""
    family, kind, protocol, _, address = info
    if not is_public(str(address[0])):
        raise PrivateAddress(str(address[0]))
    return socket.socket(family, kind, protocol)


class PublicResolver(AbstractResolver):
    """Resolves names as the system does, and refuses a name of which one address is not public."""

    def __init__(self) -> None:
        self._system = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The addresses of ``host``. Raises :class:`PrivateAddress`."""
        found = await self._system.resolve(host, port, family)
        if not all(is_public(item["host"]) for item in found):
            raise PrivateAddress(host)
        return found

    async def close(self) -> None:
        """Nothing is held."""
        await self._system.close()


def _inner(address: Address) -> Address:
    """The IPv4 address inside of an IPv6 one (mapped, 6to4, Teredo, NAT64), or the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else address)
