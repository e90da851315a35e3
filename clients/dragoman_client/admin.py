"""Changing what a server serves; for operators. The server must have been started with --admin."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from dragoman_client.types import ModelDescription, model_from
from dragoman_protos.v1 import admin_pb2 as pb
from dragoman_protos.v1 import admin_pb2_grpc as pb_grpc


@dataclass(frozen=True, slots=True)
class RepositoryEntry:
    """A version in a server's repository."""

    name: str
    version: str
    is_loaded: bool


Call = Callable[[Any, Any, float | None], Awaitable[Any]]
"""Makes a call: method of a stub, request, timeout in seconds."""


class AsyncAdmin:
    """The administrative calls of an `AsyncClient`; see its attribute `admin`.

    Every method raises one of the subclasses of `dragoman_client.errors.DragomanError`.

    Args:
        channel: of the client.
        call: makes a call as the client does.
        timeout: of each call, in seconds; loading and unloading take as long as they take.
    """

    def __init__(self, channel: grpc.aio.Channel, call: Call, timeout: float | None = 300.0) -> None:
        self._stub: Any = pb_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]
        self._call = call
        self._timeout = timeout

    async def repository(self) -> list[RepositoryEntry]:
        """The versions in the server's repository, loaded or not."""
        response = await self._call(self._stub.ListRepository, pb.ListRepositoryRequest(), self._timeout)
        return [RepositoryEntry(entry.name, entry.version, entry.is_loaded) for entry in response.entries]

    async def load(self, name: str, version: str = "", *, make_stable: bool = False) -> ModelDescription:
        """Load a version beside the others.

        Args:
            name: of the model.
            version: empty for the newest in the repository.
            make_stable: whether calls shall go to it as soon as it is ready.

        Raises:
            FailedPreconditionError: the bundle is damaged, gives wrong answers, or is loaded already.
        """
        request = pb.LoadModelRequest(name=name, version=version, label="stable" if make_stable else "")
        return model_from(await self._call(self._stub.LoadModel, request, self._timeout))

    async def unload(self, name: str, version: str) -> None:
        """Take a version out; returns when the calls that it was working on are answered and its memory is free."""
        request = pb.UnloadModelRequest(name=name, version=version)
        await self._call(self._stub.UnloadModel, request, self._timeout)

    async def route(self, name: str, *, stable: str, canary: str = "", canary_share: float = 0.0) -> None:
        """Say where calls go that name no version.

        Args:
            name: of the model.
            stable: a loaded version.
            canary: another one; empty for none.
            canary_share: of the calls, 0 to 1, for the canary.
        """
        routing = pb.Routing(stable=stable, canary=canary, canary_share=canary_share)
        await self._call(self._stub.SetRouting, pb.SetRoutingRequest(name=name, routing=routing), self._timeout)
