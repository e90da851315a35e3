"""Certificates of the gRPC port, renewed without a restart.

gRPC asks for them before every handshake, so that connections made after the files have changed get the new ones, and
those made before keep what they have. TLS 1.2 and 1.3 are spoken; nothing older.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from dragoman_server.watched_files import RefusedFileError, WatchedFiles

_WHAT = "the TLS certificate"
_Key = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey
_MIN_RSA_BITS = 2048
_CURVES = ("secp256r1", "secp384r1")
"""That gRPC's clients accept; they refuse P-521 and Ed25519."""

T = TypeVar("T")


def server_credentials(certificate: Path, key: Path, client_ca: Path | None = None) -> grpc.ServerCredentials:
    """Credentials that follow their files.

    Args:
        certificate: PEM file, the server's certificate first, then those between it and the root.
        key: PEM file, the private key of the first certificate, not encrypted.
        client_ca: PEM file; only clients with a certificate signed by one of these may connect. None: every client.

    Raises:
        RefusedFileError: listing what `certificate_problems` finds.
    """
    paths = [certificate, key] if client_ca is None else [certificate, key, client_ca]
    files = WatchedFiles(_WHAT, paths, lambda: _configuration(certificate, key, client_ca))
    return grpc.dynamic_ssl_server_credentials(files.current(), files.current, client_ca is not None)


def certificate_problems(certificate: Path, key: Path, client_ca: Path | None = None) -> list[str]:
    """Everything that is wrong with the files, to be told at start; arguments are those of `server_credentials`."""
    try:
        _configuration(certificate, key, client_ca)
    except RefusedFileError as error:
        return list(error.problems)
    return []


def _configuration(certificate: Path, key: Path, client_ca: Path | None) -> grpc.ServerCertificateConfiguration:
    """What gRPC serves: exactly the bytes that were checked."""
    problems: list[str] = []
    chain_pem, chain = _read(certificate, _load_certificates, "certificate", problems)
    key_pem, private_key = _read(key, _load_key, "private key", problems)
    ca_pem, roots = b"", None
    if client_ca is not None:
        ca_pem, roots = _read(client_ca, _load_certificates, "certificate", problems)
    now = datetime.now(UTC)
    if chain:
        problems += [f"{certificate}: {problem}" for problem in map(partial(_expiry, now), chain) if problem]
    if chain and private_key and chain[0].public_key() != private_key.public_key():
        problems.append(f"{key} is not the key of the first certificate in {certificate}")
    if roots and all(_expiry(now, root) for root in roots):
        problems.append(f"{client_ca}: no certificate in it is valid now")
    if problems:
        raise RefusedFileError(_WHAT, problems)
    return grpc.ssl_server_certificate_configuration([(key_pem, chain_pem)], ca_pem or None)


def _read(path: Path, parse: Callable[[bytes], T], what: str, problems: list[str]) -> tuple[bytes, T | None]:
    """A file's bytes and what is in them; what is wrong with it is added to the problems."""
    try:
        content = path.read_bytes()
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror}")
        return b"", None
    try:
        return content, parse(content)
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        reason = "it is encrypted, which a server cannot ask for" if isinstance(error, TypeError) else str(error)
        problems.append(f"{path} holds no {what} in PEM: {reason}")
        return content, None


def _load_certificates(content: bytes) -> list[x509.Certificate]:
    certificates = x509.load_pem_x509_certificates(content)
    for certificate in certificates:  # these are parsed when they are asked for, and only here errors are expected
        certificate.subject, certificate.public_key()
    return certificates


def _load_key(content: bytes) -> _Key:
    key = load_pem_private_key(content, password=None)
    if isinstance(key, rsa.RSAPrivateKey) and key.key_size >= _MIN_RSA_BITS:
        return key
    if isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name in _CURVES:
        return key
    raise ValueError(f"it must be RSA of at least {_MIN_RSA_BITS} bits, or ECDSA on P-256 or P-384")


def _expiry(now: datetime, certificate: x509.Certificate) -> str | None:
    """Why a certificate is not valid now."""
    name = certificate.subject.rfc4514_string() or "a certificate"
    if now < certificate.not_valid_before_utc:
        return f"{name} is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M:%S} UTC"
    if now > certificate.not_valid_after_utc:
        return f"{name} expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M:%S} UTC"
    return None
