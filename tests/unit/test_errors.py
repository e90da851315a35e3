"""Every error of the server reaches the client as the right exception, with everything it says."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from dragoman_client import errors as client
from dragoman_server import errors as server

CASES: list[tuple[server.ServiceError, type[client.DragomanError], dict[str, Any]]] = [
    (
        server.InvalidRequestError(["texts[0] is empty", "options.beam.width is 0", "the request is odd"]),
        client.InvalidRequestError,
        {
            "problems": (
                ("texts[0]", "texts[0] is empty"),
                ("options.beam.width", "options.beam.width is 0"),
                ("", "the request is odd"),
            )
        },
    ),
    (server.NotFoundError("no"), client.NotFoundError, {}),
    (server.FailedPreconditionError("no"), client.FailedPreconditionError, {}),
    (server.RefusedBundleError("no"), client.FailedPreconditionError, {}),
    (server.UnauthenticatedError("no"), client.UnauthenticatedError, {}),
    (server.NotAllowedError("no"), client.PermissionDeniedError, {}),
    (server.OverloadedError("full", 0.25, "tokens"), client.OverloadedError, {"retry_after": 0.25, "quota": "tokens"}),
    (server.OverloadedError("never", None, "sequences"), client.OverloadedError, {"quota": "sequences"}),
    (server.ShedError("full", 1.5, "sequences"), client.OverloadedError, {"retry_after": 1.5, "quota": "sequences"}),
    (
        server.RateLimitedError("slow", 2.0, "requests"),
        client.RateLimitedError,
        {"retry_after": 2, "quota": "requests"},
    ),
    (server.DeadlineError("late"), client.DeadlineExceededError, {}),
    (
        server.UnreachableDeadlineError(0.1, 0.5, 0.25),
        client.DeadlineUnreachableError,
        {
            "metadata": {
                "remaining_seconds": "0.100000",
                "wait_seconds": "0.500000",
                "decode_seconds": "0.250000",
            }
        },
    ),
    (server.ShuttingDownError("bye", 1.0), client.UnavailableError, {"retry_after": 1.0}),
    (server.EngineFailedError("broken", 5.0), client.UnavailableError, {"retry_after": 5.0}),
    (server.StepFailedError("broken"), client.ServerError, {}),
]


def concrete(kind: type[server.ServiceError]) -> set[type[server.ServiceError]]:
    """All public errors below one."""
    below = {leaf for child in kind.__subclasses__() for leaf in concrete(child)}
    return below | {child for child in kind.__subclasses__() if not child.__name__.startswith("_")}


def test_the_table_is_complete() -> None:
    assert {type(error) for error, _, _ in CASES} == concrete(server.ServiceError)
    reasons = [kind.reason for kind in concrete(server.ServiceError)]
    assert len(set(reasons)) == len(reasons)


@pytest.mark.parametrize(("error", "kind", "facts"), CASES, ids=lambda value: getattr(value, "reason", ""))
def test_an_error_survives_the_wire(
    error: server.ServiceError, kind: type[client.DragomanError], facts: dict[str, Any]
) -> None:
    status = error.status()
    assert status.code == error.code.value[0]
    trailing = Metadata((server.STATUS_DETAILS, status.SerializeToString()))
    received = client.from_rpc_error(AioRpcError(error.code, Metadata(), trailing, str(error)))
    assert type(received) is kind
    assert received.code is error.code
    assert str(received) == str(error)
    assert received.facts == client.ErrorFacts(reason=error.reason, **facts)


def test_every_error_stands_in_the_docstring() -> None:
    assert server.__doc__ is not None
    for kind in concrete(server.ServiceError):
        [line] = [line for line in server.__doc__.splitlines() if kind.__name__ in line.split()]
        assert kind.code.name in line.split()


def test_errors_of_other_servers_are_understood_as_far_as_possible() -> None:
    plain = AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), "no route")
    assert type(client.from_rpc_error(plain)) is client.UnavailableError
    junk = AioRpcError(grpc.StatusCode.INTERNAL, Metadata(), Metadata((server.STATUS_DETAILS, b"\xff\xff")), "?")
    assert client.from_rpc_error(junk).facts == client.ErrorFacts()
    large = AioRpcError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, Metadata(), Metadata(), "CLIENT: Received message larger than max (9 vs. 4)"
    )
    assert type(client.from_rpc_error(large)) is client.InvalidRequestError
