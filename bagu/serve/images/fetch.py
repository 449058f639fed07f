"""An image at an http(s) URL, for servers whose operator allows some hosts (--allow-image-host).

A URL comes from a client, and the server can reach what the client cannot: other services of its network, and the
metadata service of a cloud. So the host must be one of the allowed names; every address that the name resolves to must
be public; the connection goes to the address that was checked, not to a second answer of the name server; a redirect
is refused; bytes and seconds are bounded.
"""

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from bagu.errors import ArgumentError
from bagu.machine.image_file import MAX_BYTES

SECONDS = 5.0
PORTS = {"http": 80, "https": 443}


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public internet: not private, loopback, link-local, shared (CGNAT),
    multicast or reserved, and not such an IPv4 address inside of an IPv6 one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is not None or ip in NAT64:
            return False
    return ip.is_global and not ip.is_multicast


NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # an IPv4 address in its last four bytes


def fetch_image(url: str, hosts: Collection[str], *, allowed: Callable[[str], bool] = is_public) -> bytes:
    """The bytes at a URL of one of the hosts. Raises ArgumentError. `allowed`: whether an address may be asked."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port or PORTS.get(parts.scheme, 0)
    except ValueError as error:
        raise ArgumentError(f"the URL is not valid: {error}", hint="http(s)://host/path") from error
    if parts.scheme not in PORTS or host not in hosts or parts.username is not None:
        known = ", ".join(sorted(hosts)) or "none"
        raise ArgumentError("the URL is at a host that this server does not fetch from", hint=f"allowed: {known}")
    deadline = time.monotonic() + SECONDS
    try:
        addresses = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        if inside := [a for a in addresses if not allowed(a)]:
            raise ArgumentError(f"{host} has the address {inside[0]}, which is not public", hint="send a data URL")
        with socket.create_connection((addresses[0], port), timeout=SECONDS) as plain:
            secure = parts.scheme == "https"
            sock = ssl.create_default_context().wrap_socket(plain, server_hostname=host) if secure else plain
            with sock:
                path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                return _get(sock, parts.netloc, path, deadline)
    except (OSError, http.client.HTTPException, UnicodeError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"{host} did not send the image: {error or type(error).__name__}") from error


def _get(sock: socket.socket, netloc: str, path: str, deadline: float) -> bytes:
    """The body of a GET over a connected socket."""
    connection = http.client.HTTPConnection(netloc)
    connection.sock = sock
    connection.request("GET", path, headers={"Accept": "image/*", "Accept-Encoding": "identity"})
    response = connection.getresponse()
    if response.status != 200:
        raise ArgumentError(f"the URL answers {response.status}", hint="redirects are not followed")
    found = b""
    while piece := response.read1(2**16):
        found += piece
        if len(found) > MAX_BYTES:
            raise ArgumentError(f"the image has more than {MAX_BYTES:,} bytes", hint="send a smaller one")
        if (left := deadline - time.monotonic()) <= 0:
            raise ArgumentError(f"the image did not arrive in {SECONDS:g} s", hint="send a data URL")
        sock.settimeout(left)
    return found
