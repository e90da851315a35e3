"""What the client sends to prove who it is, to whom, and to whom not."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from dragoman_client import AsyncClient, Client, CredentialsError, DragomanError, UnavailableError
from dragoman_client.credentials import Credentials, Security, is_local
from dragoman_protos.v1 import translation_pb2 as pb
from dragoman_server.tls import server_credentials
from tests.certificates import Authority

KEY = "dgm_abcdefghijklmnopqrstuvwxyz"
PAIR: dict[str, Any] = {"source": "de", "target": "en"}


class Recorder(grpc.GenericRpcHandler):
    """Refuses every call, and notes what came with it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method

        async def call(_request: bytes, context: Any) -> bytes:
            metadata = dict(context.invocation_metadata())
            self.calls.append((method.rpartition("/")[2], metadata))
            if method.endswith("ListModels"):
                return pb.ListModelsResponse().SerializeToString()
            raise await context.abort(grpc.StatusCode.NOT_FOUND, "no")

        if "dragoman" not in method:
            return None
        if method.endswith("Stream"):

            async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
                yield await call(request, context)

            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(call)


@asynccontextmanager
async def running(credentials: grpc.ServerCredentials | None = None) -> AsyncIterator[tuple[str, Recorder]]:
    server, recorder = grpc.aio.server(options=[("grpc.so_reuseport", 0)]), Recorder()
    server.add_generic_rpc_handlers([recorder])
    port = (
        server.add_insecure_port("localhost:0")
        if credentials is None
        else server.add_secure_port("localhost:0", credentials)
    )
    await server.start()
    try:
        yield f"localhost:{port}", recorder
    finally:
        await server.stop(0)


async def test_the_key_goes_with_every_call() -> None:
    async with running() as (address, recorder), AsyncClient(address, api_key=KEY) as client:
        await client.models()
        for call in (
            client.model("x"),
            client.translate("a", **PAIR),
            client.translate_batch(["a"], **PAIR),
            client.score(["a"], ["b"], **PAIR),
            anext(client.stream("a", **PAIR)),
        ):
            with pytest.raises(DragomanError):
                await call
        [error] = [result async for result in client.translate_many(["a"], **PAIR)]
    assert isinstance(error, DragomanError)
    assert {method for method, _ in recorder.calls} == {
        method.name for method in pb.DESCRIPTOR.services_by_name["TranslationService"].methods
    }
    assert {metadata["authorization"] for _, metadata in recorder.calls} == {f"Bearer {KEY}"}


async def test_without_a_key_nothing_is_said() -> None:
    async with running() as (address, recorder), AsyncClient(address) as client:
        await client.models()
    assert "authorization" not in recorder.calls[0][1]


async def test_tls_and_mutual_tls(tmp_path: Path) -> None:
    authority, clients = Authority(), Authority("clients")
    paths = authority.issue().write(tmp_path)
    ca, clients_ca = tmp_path / "ca.crt", tmp_path / "clients.crt"
    ca.write_bytes(authority.certificate)
    clients_ca.write_bytes(clients.certificate)
    async with running(server_credentials(*paths)) as (address, recorder):
        for certificate in (ca, str(ca), authority.certificate):
            async with AsyncClient(address, ca_certificate=certificate, api_key=KEY) as client:
                await client.models()
        assert recorder.calls[0][1]["authorization"] == f"Bearer {KEY}"
        async with AsyncClient(address, 2.0, tls=True, api_key=KEY) as stranger:  # trusts only public authorities
            with pytest.raises(UnavailableError):
                await stranger.models()
        assert len(recorder.calls) == 3
    (tmp_path / "client").mkdir()
    certificate, key = clients.issue("web").write(tmp_path / "client")
    async with running(server_credentials(*paths, clients_ca)) as (address, _):
        async with AsyncClient(
            address, ca_certificate=ca, client_certificate=certificate, client_key=key.read_bytes()
        ) as client:
            await client.models()
        async with AsyncClient(address, 2.0, ca_certificate=ca) as nobody:
            with pytest.raises(UnavailableError):
                await nobody.models()


PEM = b"-----BEGIN CERTIFICATE-----"


@pytest.mark.parametrize(
    ("security", "problem"),
    [
        ({"api_key": KEY}, "would travel to mt.example.com:443 in plain text"),
        ({"api_key": KEY, "tls": False}, "in plain text"),
        ({"api_key": "", "tls": True}, "printable ASCII"),
        ({"api_key": "two words", "tls": True}, "printable ASCII"),
        ({"api_key": "line\n", "tls": True}, "printable ASCII"),
        ({"api_key": "ключ", "tls": True}, "printable ASCII"),
        ({"client_key": PEM}, "go together"),
        ({"client_certificate": PEM}, "go together"),
        ({"ca_certificate": PEM, "tls": False}, "TLS is turned off"),
        ({"ca_certificate": b"not PEM"}, "what is given is not PEM"),
        ({"ca_certificate": os.devnull}, f"{os.devnull} is not PEM"),
    ],
)
async def test_what_a_careful_user_would_not_have_meant_is_refused(security: Security, problem: str) -> None:
    with pytest.raises(CredentialsError) as caught:
        AsyncClient("mt.example.com:443", **security)
    assert problem in str(caught.value)
    assert not security.get("api_key") or str(security["api_key"]) not in str(caught.value)


async def test_every_problem_is_said_at_once() -> None:
    with pytest.raises(CredentialsError, match=r"turned off.*go together.*printable.*plain text"):
        AsyncClient("mt.example.com:443", tls=False, client_key=PEM, api_key="a b")
    with pytest.raises(FileNotFoundError):
        AsyncClient("mt.example.com:443", ca_certificate="/nowhere/ca.crt")


async def test_a_key_in_plain_text_stays_on_this_machine_or_is_meant() -> None:
    await AsyncClient("localhost:1", api_key=KEY).close()
    await AsyncClient("mt.example.com:443", api_key=KEY, tls=True).close()
    await AsyncClient("10.0.0.1:50051", api_key=KEY, allow_plaintext_key=True).close()
    assert KEY not in repr(Credentials.check("localhost:1", api_key=KEY))


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ("localhost:50051", True),
        ("localhost", True),
        ("127.0.0.1:50051", True),
        ("127.8.8.8:1", True),
        ("[::1]:50051", True),
        ("unix:/run/dragoman.sock", True),
        ("unix:///run/dragoman.sock", True),
        ("unix-abstract:dragoman", True),
        ("dns:///localhost:50051", True),
        ("dns:localhost:50051", True),
        ("ipv4:127.0.0.1:1,127.0.0.2:1", True),
        ("ipv6:[::1]:1", True),
        ("", False),
        ("::1", False),
        ("mt.example.com:443", False),
        ("localhost.example.com:443", False),
        ("localhost@example.com:443", False),
        ("127.0.0.1.example.com:443", False),
        ("0.0.0.0:50051", False),
        ("10.0.0.1:50051", False),
        ("[fe80::1]:50051", False),
        ("dns:///mt.example.com:443", False),
        ("dns://8.8.8.8/localhost:50051", False),
        ("ipv4:127.0.0.1:1,10.0.0.1:1", False),
        ("localhost:1,example.com:2", False),
        ("xds:///localhost:1", False),
        ("0x7f000001:1", False),
        ("localhost\n:1", False),
    ],
)
def test_only_this_machine_is_local(server: str, expected: bool) -> None:
    assert is_local(server) is expected


async def test_a_key_in_plain_text_goes_to_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.setblocking(False)
        for name in ("no_proxy", "no_grpc_proxy", "grpc_proxy", "https_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        async with running() as (address, recorder), AsyncClient(address, api_key=KEY) as client:
            await client.models()
            assert len(recorder.calls) == 1
            with pytest.raises(BlockingIOError):
                proxy.accept()
            async with AsyncClient(address, 0.3) as keyless:  # which has nothing to hide, and follows the environment
                with pytest.raises(DragomanError):
                    await keyless.models()
            proxy.accept()[0].close()


def test_a_client_that_could_not_be_made_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(CredentialsError):
        Client("mt.example.com:443", api_key=KEY)
    assert threading.active_count() == before
    with Client("localhost:1", api_key=KEY) as client, pytest.raises(UnavailableError):
        client.models(timeout=2)


def dragoman(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dragoman_client", "models", *arguments],
        env=os.environ | variables, capture_output=True, text=True, encoding="utf-8", timeout=60, check=False,
    )  # fmt: skip


async def test_the_command_takes_everything_from_the_environment(tmp_path: Path) -> None:
    authority = Authority()
    ca, key = tmp_path / "ca.crt", tmp_path / "key"
    ca.write_bytes(authority.certificate)
    key.write_text(KEY + "\n", encoding="utf-8")
    async with running(server_credentials(*authority.issue().write(tmp_path))) as (address, recorder):
        variables = {"DRAGOMAN_SERVER": address, "DRAGOMAN_CA_CERTIFICATE": str(ca)}
        by_variable = await asyncio.to_thread(dragoman, **variables, DRAGOMAN_API_KEY=KEY)
        by_file = await asyncio.to_thread(dragoman, "--tls", "--api-key-file", str(key), **variables)
    assert (by_variable.returncode, by_file.returncode) == (0, 0), by_variable.stderr + by_file.stderr
    assert [metadata["authorization"] for _, metadata in recorder.calls] == [f"Bearer {KEY}"] * 2


def test_the_command_explains_what_it_refuses(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n", encoding="utf-8")
    plain = dragoman("--server", "mt.example.com:443", DRAGOMAN_API_KEY=KEY)
    assert (plain.returncode, "--allow-plaintext-key" in plain.stderr) == (2, True)
    two = dragoman("--api-key-file", str(tmp_path / "empty"), DRAGOMAN_API_KEY=KEY)
    assert (two.returncode, "two keys" in two.stderr) == (2, True)
    empty = dragoman("--api-key-file", str(tmp_path / "empty"))
    assert (empty.returncode, "printable ASCII" in empty.stderr) == (2, True)
    missing = dragoman("--tls", "--ca-certificate", str(tmp_path / "no.crt"))
    assert (missing.returncode, "no.crt" in missing.stderr) == (1, True)
    assert KEY not in dragoman("--help", DRAGOMAN_API_KEY=KEY).stdout
    assert KEY not in plain.stderr + two.stderr
