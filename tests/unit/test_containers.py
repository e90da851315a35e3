"""What the deployment files promise. No container engine is needed, and none has built them here."""

from __future__ import annotations

import json
import re
import shlex
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from dragoman_server import healthcheck

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")


def instructions(name: str) -> list[str]:
    """What follows an instruction of the Dockerfile, in its last stage."""
    stage = re.split(r"^FROM .*\n", DOCKERFILE, flags=re.MULTILINE)[-1].replace("\\\n", " ")
    return re.findall(rf"^{name} (.*)$", stage, re.MULTILINE)


def test_the_container_runs_as_a_number_that_is_not_root() -> None:
    [user] = instructions("USER")
    uid, gid = map(int, user.split(":"))
    assert uid > 0
    assert gid > 0
    after = DOCKERFILE[DOCKERFILE.index(f"USER {user}") :]
    assert not re.search(r"^(RUN|COPY|ADD) ", after, re.MULTILINE), "nothing it runs belongs to it"
    assert not instructions("RUN"), "the last stage has nothing but what the first one built"
    assert "--chown" not in DOCKERFILE


def test_nothing_secret_is_built_in() -> None:
    [variables] = instructions("ENV")
    names = {assignment.partition("=")[0] for assignment in shlex.split(variables)}
    assert not {name for name in names if re.search("KEY|TOKEN|SECRET|PASSWORD|CERT", name)}
    copied = [path for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE) for path in line.split()]
    assert "." not in copied, "only what is named, never whatever lies around"


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_every_container_is_read_only_and_without_privileges(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service
    assert "no-new-privileges:true" in service["security_opt"]
    assert not service.keys() & {"privileged", "user", "network_mode", "pid", "ipc", "devices"}
    assert all({"noexec", "nosuid", "nodev"} <= set(mount.partition(":")[2].split(",")) for mount in service["tmpfs"])
    for volume in service.get("volumes", []):
        source, _, mode = volume.partition(":")
        assert source in COMPOSE["volumes"] or mode.endswith(":ro"), "files of this machine cannot be changed"
        assert "docker.sock" not in volume


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_nothing_is_published_beyond_this_machine(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in COMPOSE["services"][name].get("ports", []))


def test_the_health_check_is_the_one_that_follows_the_port() -> None:
    [line] = instructions("HEALTHCHECK")
    command = json.loads(line[line.index("CMD ") + 4 :])
    assert command == ["python", "-m", healthcheck.__spec__.name]


@pytest.fixture
def health_port() -> Any:
    """A server that answers health checks as ours does."""
    server = grpc.server(ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port, lambda status: servicer.set("", status)
    server.stop(None)


def test_the_health_check_asks_the_server_at_its_port(health_port: Any, tmp_path: Path) -> None:
    port, set_status = health_port
    container = {"DRAGOMAN_HOST": "0.0.0.0", "DRAGOMAN_PORT": str(port)}  # noqa: S104 - as the Dockerfile says
    assert healthcheck.main(container) == 0
    set_status(health_pb2.HealthCheckResponse.NOT_SERVING)
    assert healthcheck.main(container) == 1
    set_status(health_pb2.HealthCheckResponse.SERVING)
    (tmp_path / "server.toml").write_text(f"port = {port}\n", encoding="utf-8")
    assert healthcheck.main({"DRAGOMAN_CONFIG": str(tmp_path / "server.toml")}) == 0
    outweighed = {"DRAGOMAN_CONFIG": str(tmp_path / "server.toml"), "DRAGOMAN_PORT": "1"}
    assert healthcheck.main(outweighed) == 1


def test_the_health_check_of_a_server_with_tls_only_connects(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        container = {"DRAGOMAN_PORT": str(server.getsockname()[1]), "DRAGOMAN_TLS_CERTIFICATE": "/tls.crt"}
        assert healthcheck.main(container) == 0
    assert healthcheck.main(container) == 1
    assert "does not serve" in capsys.readouterr().err
