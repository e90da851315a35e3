"""Certificates for tests, signed by an authority that lives as long as the test."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

NOW = datetime.now(UTC)


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: CertificateIssuerPrivateKeyTypes) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its key, as PEM."""

    certificate: bytes
    key: bytes

    def write(self, directory: Path) -> tuple[Path, Path]:
        """Paths of the certificate and of the key."""
        certificate, key = directory / "tls.crt", directory / "tls.key"
        certificate.write_bytes(self.certificate)
        key.write_bytes(self.key)
        return certificate, key


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates."""

    name: str = "authority"
    key: ec.EllipticCurvePrivateKey = field(default_factory=new_key)

    @property
    def certificate(self) -> bytes:
        """Of the authority itself."""
        return self._sign(self.name, self.key, NOW - timedelta(days=1), NOW + timedelta(days=1), is_authority=True)

    def issue(
        self,
        common_name: str = "localhost",
        key: CertificateIssuerPrivateKeyTypes | None = None,
        begins: timedelta = timedelta(days=-1),
        ends: timedelta = timedelta(days=1),
    ) -> Issued:
        """A certificate for localhost."""
        key = key or new_key()
        return Issued(self._sign(common_name, key, NOW + begins, NOW + ends, is_authority=False), key_pem(key))

    def _sign(
        self,
        common_name: str,
        key: CertificateIssuerPrivateKeyTypes,
        begins: datetime,
        ends: datetime,
        *,
        is_authority: bool,
    ) -> bytes:
        names = x509.SubjectAlternativeName([x509.DNSName("localhost")])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_name(common_name))
            .issuer_name(_name(self.name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begins)
            .not_valid_after(ends)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(names, critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return certificate.public_bytes(Encoding.PEM)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
