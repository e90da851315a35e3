"""A server with everything turned on, called by who may, who may not, and who may too often."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from dragoman_client import (
    Client,
    PermissionDeniedError,
    RateLimitedError,
    UnauthenticatedError,
    UnavailableError,
)
from dragoman_protos.v1 import admin_pb2, admin_pb2_grpc
from dragoman_server.access import new_key
from tests.certificates import Authority
from tests.e2e.server_process import ServerProcess, running_server
from tests.readme import ROOT

MODELS = ROOT / "deploy" / "models"
PAIR: dict[str, Any] = {"source": "en", "target": "zh"}
PRIVATE = "The password of Zanzibar is swordfish."


class Secured(NamedTuple):
    """A server over TLS, with three keys."""

    server: ServerProcess
    authority: Authority
    directory: Path
    keys: dict[str, str]

    @property
    def address(self) -> str:
        return "localhost:" + self.server.address.rpartition(":")[2]

    def client(self, key: str | None = None) -> Client:
        """With one of the keys, by its name, or with another one."""
        key = self.keys.get(key, key) if key else None
        return Client(self.address, 10, ca_certificate=self.authority.certificate, api_key=key)

    def admin(self, key: str) -> admin_pb2.ListRepositoryResponse:
        credentials = grpc.ssl_channel_credentials(self.authority.certificate)
        with grpc.secure_channel(self.address, credentials) as channel:
            stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
            metadata = (("x-api-key", self.keys[key]),)
            answer: admin_pb2.ListRepositoryResponse = stub.ListRepository(
                admin_pb2.ListRepositoryRequest(), timeout=10, metadata=metadata
            )
            return answer


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    directory, authority = tmp_path_factory.mktemp("secured"), Authority()
    certificate, key = authority.issue().write(directory)
    made = {
        "web": new_key("web"),
        "ops": new_key("ops", ["admin"]),
        "slow": new_key("slow", characters_per_second=20, burst_seconds=1),
    }
    (directory / "keys.toml").write_text("".join(entry for _, entry in made.values()), encoding="utf-8")
    options = ["--tls-certificate", str(certificate), "--tls-key", str(key), "--api-keys", str(directory / "keys.toml")]
    options += ["--admin", "--no-reflection", "--log-requests", "--log-level", "debug", "--instances", "1"]
    with running_server(MODELS, *options) as server:
        yield Secured(server, authority, directory, {name: key for name, (key, _) in made.items()})


def test_each_key_may_do_what_it_is_for(secured: Secured) -> None:
    with secured.client("web") as web:
        assert web.translate("I love you.", **PAIR).text
        assert web.models()
    assert secured.admin("ops").entries
    with secured.client("ops") as ops, pytest.raises(PermissionDeniedError, match="needs the right 'translate'"):
        ops.translate("I love you.", **PAIR)
    with pytest.raises(grpc.RpcError) as caught:
        secured.admin("web")
    refused: Any = caught.value
    assert refused.code() is grpc.StatusCode.PERMISSION_DENIED


def test_nobody_else_comes_in(secured: Secured) -> None:
    with secured.client() as nobody, pytest.raises(UnauthenticatedError, match="a key is needed"):
        nobody.models()
    with secured.client("dgm_guessed") as guesser, pytest.raises(UnauthenticatedError, match="not known"):
        guesser.translate(PRIVATE, **PAIR)
    with Client(secured.address, 2) as plain, pytest.raises(UnavailableError):
        plain.models()


def test_a_rate_holds_and_says_when_to_come_again(secured: Secured) -> None:
    with secured.client("slow") as slow:
        slow.translate("I love you very.", **PAIR)
        with pytest.raises(RateLimitedError, match="slow has used up its characters_per_second") as caught:
            slow.translate("I love you very.", **PAIR)
        assert caught.value.retry_after is not None
        assert 0 < caught.value.retry_after <= 0.8
        time.sleep(caught.value.retry_after + 0.01)
        slow.translate("I love you very.", **PAIR)


def test_health_needs_no_key_and_reflection_is_off(secured: Secured) -> None:
    credentials = grpc.ssl_channel_credentials(secured.authority.certificate)
    with grpc.secure_channel(secured.address, credentials) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=5).status == health_pb2.HealthCheckResponse.SERVING
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(
                reflection.ServerReflectionInfo(
                    iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5
                )
            )
        refused: Any = caught.value
        assert refused.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_key_that_is_taken_out_is_refused_at_once(secured: Secured) -> None:
    path = secured.directory / "keys.toml"
    before = path.read_text(encoding="utf-8")
    key, entry = new_key("guest")
    path.write_text(before + entry, encoding="utf-8")
    with secured.client(key) as guest:
        guest.models()
        path.write_text(before, encoding="utf-8")
        with pytest.raises(UnauthenticatedError):
            guest.models()


def test_a_renewed_certificate_is_served(secured: Secured) -> None:
    after = Authority("the next authority")
    after.issue().write(secured.directory)
    with Client(secured.address, 10, ca_certificate=after.certificate, api_key=secured.keys["web"]) as client:
        client.models()
    secured.authority.issue().write(secured.directory)


def test_neither_log_nor_metrics_carry_texts_keys_or_addresses(secured: Secured) -> None:
    with secured.client("web") as web:
        translation = web.translate(PRIVATE, **PAIR).text
        list(web.stream(PRIVATE, **PAIR))
        web.score([PRIVATE], [translation], **PAIR)
    page, log = secured.server.metrics(), secured.server.log()
    assert "Translate OK" in log
    assert 'method="Translate"' in page
    for private in (PRIVATE, "Zanzibar", "swordfish", translation, "dgm_", *secured.keys.values()):
        assert private not in page + log
    for line in page.splitlines():
        assert not re.search(r"127\.0\.0\.1|localhost|::1", line)
    labels = set(re.findall(r'[{,]([a-z_]+)="', page))
    assert not labels & {"caller", "client", "peer", "address", "user", "key", "request_id", "text"}


def start(*options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "dragoman_server", "--models", str(MODELS), "--port", "0", "--metrics-port", "-1"]
    result = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60, check=False)
    return result.returncode, result.stderr


def test_files_that_cannot_be_used_are_explained(tmp_path: Path) -> None:
    certificate, _ = Authority().issue().write(tmp_path)
    code, message = start("--tls-certificate", str(certificate), "--tls-key", str(tmp_path / "no.key"))
    assert (code, "no.key cannot be read" in message, "Traceback" in message) == (1, True, False)
    (tmp_path / "keys.toml").write_text("[[keys]]\n", encoding="utf-8")
    code, message = start("--api-keys", str(tmp_path / "keys.toml"))
    assert (code, "sha256 must be 64" in message, "Traceback" in message) == (1, True, False)


def test_a_client_certificate_is_asked_for_and_gives_no_right_to_load_models(tmp_path: Path) -> None:
    authority, clients = Authority(), Authority("clients")
    certificate, key = authority.issue().write(tmp_path)
    (tmp_path / "clients.crt").write_bytes(clients.certificate)
    options = ["--tls-certificate", str(certificate), "--tls-key", str(key), "--instances", "1", "--admin"]
    with running_server(MODELS, *options, "--tls-client-ca", str(tmp_path / "clients.crt")) as server:
        address = "localhost:" + server.address.rpartition(":")[2]
        web = clients.issue("web")
        with Client(
            address, 10, ca_certificate=authority.certificate, client_certificate=web.certificate, client_key=web.key
        ) as client:
            assert client.translate("I love you.", **PAIR).text
        with Client(address, 2, ca_certificate=authority.certificate) as nobody, pytest.raises(UnavailableError):
            nobody.models()
        credentials = grpc.ssl_channel_credentials(authority.certificate, web.key, web.certificate)
        with grpc.secure_channel(address, credentials) as channel:
            stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.ListRepository(admin_pb2.ListRepositoryRequest(), timeout=5)
            refused: Any = caught.value
            assert refused.code() is grpc.StatusCode.PERMISSION_DENIED


def test_a_server_that_others_can_reach_says_what_it_leaves_open() -> None:
    with running_server(MODELS, "--host", "0.0.0.0", "--instances", "1") as server:  # noqa: S104 - this is the test
        assert "may translate; set --api-keys" in server.log()
