"""Real gRPC servers and clients over TLS, and every way in which certificate files are wrong."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from dragoman_server.tls import certificate_problems, server_credentials
from dragoman_server.watched_files import RefusedFileError
from tests.certificates import Authority, Issued, key_pem, new_key

ECHO = "/test.Echo/Call"


class Echo(grpc.GenericRpcHandler):
    """Answers with what it was sent; notes who sent it."""

    def __init__(self) -> None:
        self.contexts: list[Any] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def call(request: bytes, context: Any) -> bytes:
            self.contexts.append(context.auth_context())
            return request

        return grpc.unary_unary_rpc_method_handler(call) if handler_call_details.method == ECHO else None


@asynccontextmanager
async def running(credentials: grpc.ServerCredentials) -> AsyncIterator[tuple[int, Echo]]:
    server, echo = grpc.aio.server(options=[("grpc.so_reuseport", 0)]), Echo()
    server.add_generic_rpc_handlers([echo])
    port = server.add_secure_port("localhost:0", credentials)
    await server.start()
    try:
        yield port, echo
    finally:
        await server.stop(0)


async def call(port: int, authority: bytes, client: Issued | None = None) -> bytes:
    """One call over a connection of its own."""
    pair = (None, None) if client is None else (client.key, client.certificate)
    credentials = grpc.ssl_channel_credentials(authority, *pair)
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(f"localhost:{port}", credentials, options) as channel:
        method: Any = channel.unary_unary(ECHO)
        answer: bytes = await method(b"hello", timeout=5)
        return answer


def served(port: int) -> int:
    """Serial number of the certificate that a new connection gets."""
    return x509.load_pem_x509_certificate(ssl.get_server_certificate(("localhost", port)).encode()).serial_number


def serial(issued: Issued) -> int:
    return x509.load_pem_x509_certificate(issued.certificate).serial_number


async def test_calls_go_over_tls(tmp_path: Path) -> None:
    authority = Authority()
    async with running(server_credentials(*authority.issue().write(tmp_path))) as (port, echo):
        assert await call(port, authority.certificate) == b"hello"
        assert echo.contexts[0]["transport_security_type"] == [b"ssl"]
        with pytest.raises(grpc.aio.AioRpcError):  # a client that trusts somebody else
            await call(port, Authority("other").certificate)
        async with grpc.aio.insecure_channel(f"localhost:{port}") as channel:
            method: Any = channel.unary_unary(ECHO)
            with pytest.raises(grpc.aio.AioRpcError):
                await method(b"", timeout=5)


async def test_mutual_tls_wants_a_certificate_of_its_authority(tmp_path: Path) -> None:
    authority, clients = Authority(), Authority("clients")
    ca = tmp_path / "ca.crt"
    ca.write_bytes(clients.certificate)
    credentials = server_credentials(*authority.issue().write(tmp_path), ca)
    async with running(credentials) as (port, echo):
        assert await call(port, authority.certificate, clients.issue("web")) == b"hello"
        assert echo.contexts[0]["x509_common_name"] == [b"web"]
        for client in (None, Authority("clients").issue("web"), clients.issue("web", ends=timedelta(hours=-1))):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(port, authority.certificate, client)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert len(echo.contexts) == 1


async def test_an_authority_of_clients_is_replaced_without_a_restart(tmp_path: Path) -> None:
    authority, before, after = Authority(), Authority("before"), Authority("after")
    ca = tmp_path / "ca.crt"
    ca.write_bytes(before.certificate)
    async with running(server_credentials(*authority.issue().write(tmp_path), ca)) as (port, _):
        await call(port, authority.certificate, before.issue())
        ca.write_bytes(after.certificate)
        await call(port, authority.certificate, after.issue())
        with pytest.raises(grpc.aio.AioRpcError):
            await call(port, authority.certificate, before.issue())


async def test_a_renewed_certificate_is_served_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    authority = Authority()
    first, second = authority.issue(), authority.issue()
    async with running(server_credentials(*first.write(tmp_path))) as (port, _):
        assert served(port) == serial(first)
        second.write(tmp_path)
        assert served(port) == served(port) == serial(second)
        assert await call(port, authority.certificate) == b"hello"
    assert caplog.text.count("read again") == 1


def swap(directory: Path, version: str, issued: Issued) -> tuple[Path, Path]:
    """Put files in place as Kubernetes does: tls.crt → ..data/tls.crt, and ..data → a directory, swapped at once."""
    target = directory / version
    target.mkdir()
    issued.write(target)
    link = directory / "..data_tmp"
    link.symlink_to(version)
    link.rename(directory / "..data")
    return directory / "tls.crt", directory / "tls.key"


async def test_a_swapped_link_is_a_renewal(tmp_path: Path) -> None:
    authority = Authority()
    first, second = authority.issue(), authority.issue()
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).symlink_to(Path("..data") / name)
    paths = swap(tmp_path, "..1", first)
    before = paths[0].stat()
    async with running(server_credentials(*paths)) as (port, _):
        assert served(port) == serial(first)
        swap(tmp_path, "..2", second)
        os.utime(paths[0], ns=(before.st_atime_ns, before.st_mtime_ns))
        assert served(port) == serial(second)


def remove_key(directory: Path) -> None:
    (directory / "tls.key").unlink()


def write_other_key(directory: Path) -> None:
    (directory / "tls.key").write_bytes(key_pem(new_key()))


def write_half_a_certificate(directory: Path) -> None:
    (directory / "tls.crt").write_bytes((directory / "tls.crt").read_bytes()[:200])


def write_an_expired_certificate(directory: Path) -> None:
    Authority().issue(ends=timedelta(hours=-1)).write(directory)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (remove_key, "cannot be read"),
        (write_other_key, "is not the key of the first certificate"),
        (write_half_a_certificate, "no certificate in PEM"),
        (write_an_expired_certificate, "expired on"),
    ],
)
async def test_a_broken_renewal_keeps_what_there_was(
    damage: Callable[[Path], None], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority()
    first, second = authority.issue(), authority.issue()
    async with running(server_credentials(*first.write(tmp_path))) as (port, _):
        damage(tmp_path)
        assert served(port) == served(port) == serial(first)
        assert await call(port, authority.certificate) == b"hello"
        assert [said in record.message for record in caplog.records] == [True], "once, and clearly"
        second.write(tmp_path)
        assert served(port) == serial(second)


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    authority = Authority()
    certificate, key = authority.issue(ends=timedelta(hours=-1)).write(tmp_path)
    key.write_bytes(key_pem(new_key()))
    missing, expired, mismatch = certificate_problems(certificate, key, tmp_path / "no.crt")
    assert "CN=localhost expired on" in expired
    assert "tls.key is not the key of the first certificate in" in mismatch
    assert "no.crt cannot be read: No such file or directory" in missing
    with pytest.raises(RefusedFileError) as caught:
        server_credentials(certificate, key, tmp_path / "no.crt")
    assert caught.value.problems == (missing, expired, mismatch)


def test_files_that_are_something_else_are_refused(tmp_path: Path) -> None:
    issued = Authority().issue()
    certificate, key = issued.write(tmp_path)
    assert certificate_problems(certificate, key) == []
    assert len(certificate_problems(key, certificate)) == 2, "one for the other"
    (tmp_path / "empty").write_bytes(b"")
    assert len(certificate_problems(tmp_path / "empty", tmp_path / "empty", tmp_path / "empty")) == 3
    assert "cannot be read: Is a directory" in certificate_problems(tmp_path, key)[0]
    certificate.write_bytes(Authority().issue(begins=timedelta(hours=1)).certificate)
    assert "is not valid before" in certificate_problems(certificate, key)[0]


@pytest.mark.parametrize(
    ("key", "is_accepted"),
    [
        (rsa.generate_private_key(65537, 2048), True),
        (ec.generate_private_key(ec.SECP384R1()), True),
        (rsa.generate_private_key(65537, 1024), False),  # noqa: S505 - too easily broken
        (ec.generate_private_key(ec.SECP521R1()), False),  # gRPC's clients do not accept these two
        (ed25519.Ed25519PrivateKey.generate(), False),
    ],
)
async def test_keys_are_of_a_kind_that_clients_accept(key: Any, is_accepted: bool, tmp_path: Path) -> None:
    authority = Authority()
    paths = authority.issue(key=key).write(tmp_path)
    if is_accepted:
        async with running(server_credentials(*paths)) as (port, _):
            assert await call(port, authority.certificate) == b"hello"
    else:
        assert "it must be RSA of at least 2048 bits, or ECDSA on P-256 or P-384" in certificate_problems(*paths)[0]


def test_an_encrypted_key_is_explained(tmp_path: Path) -> None:
    key = new_key()
    certificate, path = Authority().issue(key=key).write(tmp_path)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    assert "it is encrypted" in certificate_problems(certificate, path)[0]


def test_an_expired_authority_beside_a_valid_one_is_no_problem(tmp_path: Path) -> None:
    certificate, key = Authority().issue().write(tmp_path)
    ca = tmp_path / "ca.crt"
    old = Authority().issue(ends=timedelta(hours=-1)).certificate
    ca.write_bytes(old)
    assert "no certificate in it is valid now" in certificate_problems(certificate, key, ca)[0]
    ca.write_bytes(old + Authority().certificate)
    assert certificate_problems(certificate, key, ca) == []


async def test_a_certificate_of_the_future_is_taken_when_its_time_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in the files changes then; a clock that is behind must not need a second renewal."""
    authority = Authority()
    first, second = authority.issue(), authority.issue(begins=timedelta(hours=1))
    async with running(server_credentials(*first.write(tmp_path))) as (port, _):
        second.write(tmp_path)
        assert served(port) == serial(first)
        monkeypatch.setattr("dragoman_server.tls._expiry", lambda _now, _certificate: None)
        assert served(port) == serial(second)
