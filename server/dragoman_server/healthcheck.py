"""`python -m dragoman_server.healthcheck`: whether the server of this container serves, for container engines.

It finds the server as the server finds its settings: in DRAGOMAN_* variables, then in the file that DRAGOMAN_CONFIG
names; flags of another process it cannot see. Without TLS it asks grpc.health.v1.Health, for which nobody needs a key.
With TLS it only connects: it has no client certificate to show, and the server's is for another name than localhost.
"""

from __future__ import annotations

import os
import socket
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TIMEOUT_S = 2.0
_EVERY_INTERFACE = ("", "0.0.0.0", "::", "[::]")  # noqa: S104 - what a server listens on, not what this connects to


def main(environment: Mapping[str, str] = os.environ) -> int:
    """Run the check; 0 if the server serves, 1 if not."""
    host, port, has_tls = _server(environment)
    try:
        return 0 if (_accepts if has_tls else _serves)(host, port) else 1
    except (OSError, grpc.RpcError) as error:
        sys.stderr.write(f"{host}:{port} does not serve: {error}\n")
        return 1


def _server(environment: Mapping[str, str]) -> tuple[str, int, bool]:
    """Host, port, and whether it speaks TLS."""
    path = environment.get("DRAGOMAN_CONFIG")
    settings: dict[str, Any] = tomllib.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    for name in ("host", "port", "tls_certificate"):
        if f"DRAGOMAN_{name.upper()}" in environment:
            settings[name] = environment[f"DRAGOMAN_{name.upper()}"]
    host = str(settings.get("host", "127.0.0.1"))
    has_tls = bool(settings.get("tls_certificate"))
    return "127.0.0.1" if host in _EVERY_INTERFACE else host, int(settings.get("port", 50051)), has_tls


def _serves(host: str, port: int) -> bool:
    options = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(f"{host}:{port}", options) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _accepts(host: str, port: int) -> bool:
    with socket.create_connection((host.strip("[]"), port), timeout=_TIMEOUT_S):
        return True


if __name__ == "__main__":
    sys.exit(main())
