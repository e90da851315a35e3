"""How a client makes sure of its server, and shows the server who it is."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

import grpc

_KEY = re.compile(r"[\x21-\x7e]{1,4096}")
_NO_PROXY = ("grpc.enable_http_proxy", 0)

Pem = Path | str | bytes
"""A PEM file's path, or its bytes."""


class CredentialsError(ValueError):
    """Credentials that contradict each other, or that must not be used as they are; the message lists every problem."""


class Security(TypedDict, total=False):
    """Keyword arguments of clients; everything may be left out. Without any, calls are neither encrypted nor signed."""

    tls: bool | None
    """Whether to encrypt, and to check the server's certificate; None: if any certificate is given."""
    ca_certificate: Pem | None
    """Whom to trust to have signed the server's certificate; None: the authorities that come with gRPC."""
    client_certificate: Pem | None
    """Shown to servers that ask for one (mutual TLS)."""
    client_key: Pem | None
    """Of the client certificate."""
    api_key: str | None
    """Sent with every call."""
    allow_plaintext_key: bool
    """Send the key without TLS to other machines too: everybody on the way can read it, and then use it."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials that may be used with a server; `check` makes them."""

    channel_credentials: grpc.ChannelCredentials | None
    """None: plain text."""
    metadata: tuple[tuple[str, str], ...] = field(repr=False)
    """For every call."""

    @classmethod
    def check(cls, server: str, **security: Unpack[Security]) -> Self:
        """Read the files, and refuse what a careful user would not have meant.

        Args:
            server: that they are for.
            security: see `Security`.

        Raises:
            CredentialsError: listing everything that is wrong.
            OSError: a file cannot be read.
        """
        if problems := list(_problems(server, security)):
            raise CredentialsError("; ".join(problems))
        key = security.get("api_key")
        metadata = (("authorization", f"Bearer {key}"),) if key else ()
        if not _encrypts(security):
            return cls(None, metadata)
        pems = (security.get("ca_certificate"), security.get("client_key"), security.get("client_certificate"))
        return cls(grpc.ssl_channel_credentials(*map(_read_pem, pems)), metadata)

    def open_channel(self, server: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel to the server that they were checked for."""
        if self.channel_credentials is not None:
            return grpc.aio.secure_channel(server, self.channel_credentials, options)
        # A key in plain text is for this machine; gRPC would hand it to a proxy if the environment names one.
        return grpc.aio.insecure_channel(server, [*options, _NO_PROXY] if self.metadata else options)


def _problems(server: str, security: Security) -> Iterator[str]:
    encrypts = _encrypts(security)
    if not encrypts and _has_certificates(security):
        yield "certificates are given, but TLS is turned off"
    if (security.get("client_certificate") is None) != (security.get("client_key") is None):
        yield "client_certificate and client_key go together"
    key = security.get("api_key")
    if key is None:
        return
    if not _KEY.fullmatch(key):  # without showing it
        yield "the API key must be printable ASCII without spaces"
    if not (encrypts or is_local(server) or security.get("allow_plaintext_key")):
        yield (
            f"the API key would travel to {server} in plain text, for everybody on the way to read; "
            "turn TLS on (tls=True, --tls), or say that you want this (allow_plaintext_key=True, --allow-plaintext-key)"
        )


def _encrypts(security: Security) -> bool:
    tls = security.get("tls")
    return _has_certificates(security) if tls is None else tls


def _has_certificates(security: Security) -> bool:
    return any(security.get(name) is not None for name in ("ca_certificate", "client_certificate", "client_key"))


def _read_pem(pem: Pem | None) -> bytes | None:
    if pem is None:
        return None
    content = pem if isinstance(pem, bytes) else Path(pem).read_bytes()
    if b"-----BEGIN " not in content:  # gRPC would say so only in its log, and then fail to connect
        raise CredentialsError(f"{'what is given' if isinstance(pem, bytes) else pem} is not PEM")
    return content


def is_local(server: str) -> bool:
    """Whether calls to an address stay on this machine; False where that is not certain.

    Args:
        server: as gRPC takes it: HOST:PORT, a URI such as dns:///HOST:PORT, or several addresses with commas.
    """
    if server.startswith(("unix:", "unix-abstract:")):
        return True
    addresses = re.sub(r"^(dns:///|dns:(?!/)|ipv4:|ipv6:)", "", server)
    return all(map(_is_loopback, addresses.split(",")))


def _is_loopback(address: str) -> bool:
    bracketed = re.fullmatch(r"\[(.*)\](:\d+)?", address)
    host = bracketed[1] if bracketed else re.sub(r":\d+$", "", address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
