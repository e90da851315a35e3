"""What a server's settings leave open to whoever can reach it."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator


def exposures(host: str, *, has_tls: bool, has_client_ca: bool, has_keys: bool) -> Iterator[str]:
    """What an operator may not have meant, a line each; nothing for a server that only its own machine can reach.

    Args:
        host: to listen on.
        has_tls: --tls-certificate is set.
        has_client_ca: --tls-client-ca is set.
        has_keys: --api-keys is set.
    """
    if is_loopback(host):
        return
    if not has_tls:
        what = "texts and keys travel" if has_keys else "texts travel"
        yield f"{host} can be reached from other machines, and {what} unencrypted; set --tls-certificate"
    if not (has_keys or has_client_ca):
        yield f"whoever can reach {host} may translate; set --api-keys or --tls-client-ca"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost" or host.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name, and where it leads is not known
        return False
