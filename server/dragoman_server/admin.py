"""The RPCs that change what is served."""

from __future__ import annotations

import logging
from collections.abc import Callable

import grpc
from google.protobuf.message import Message

from dragoman_protos.v1 import admin_pb2 as pb
from dragoman_protos.v1 import admin_pb2_grpc as pb_grpc
from dragoman_protos.v1 import translation_pb2
from dragoman_server.answers import description
from dragoman_server.errors import InvalidRequestError
from dragoman_server.model import ServedModel
from dragoman_server.repository import ModelRepository, Routing
from dragoman_server.validation import unknown_fields

_LOG = logging.getLogger(__name__)


class AdminServicer(pb_grpc.AdminServiceServicer):
    """dragoman.v1.AdminService.

    Args:
        repository: to change.
        loaded: is told of every model that has been loaded.
        unloaded: is told of every model that has gone.
    """

    def __init__(
        self,
        repository: ModelRepository,
        loaded: Callable[[ServedModel], None],
        unloaded: Callable[[ServedModel], None],
    ) -> None:
        self._repository = repository
        self._loaded = loaded
        self._unloaded = unloaded

    async def ListRepository(  # noqa: N802 - the name is the RPC's
        self,
        request: pb.ListRepositoryRequest,
        context: grpc.aio.ServicerContext[pb.ListRepositoryRequest, pb.ListRepositoryResponse],  # noqa: ARG002
    ) -> pb.ListRepositoryResponse:
        """See admin.proto."""
        _check(request)
        entry = pb.ListRepositoryResponse.Entry
        return pb.ListRepositoryResponse(
            entries=[
                entry(name=name, version=version, is_loaded=is_loaded)
                for name, version, is_loaded in self._repository.on_disk()
            ]
        )

    async def LoadModel(  # noqa: N802 - the name is the RPC's
        self,
        request: pb.LoadModelRequest,
        context: grpc.aio.ServicerContext[pb.LoadModelRequest, translation_pb2.Model],  # noqa: ARG002
    ) -> translation_pb2.Model:
        """See admin.proto."""
        _check(request, "name")
        model = await self._repository.load(request.name, request.version, request.label, self._loaded)
        _LOG.info("model %s version %s was loaded on request", model.name, model.version)
        return description(model, self._repository)

    async def UnloadModel(  # noqa: N802 - the name is the RPC's
        self,
        request: pb.UnloadModelRequest,
        context: grpc.aio.ServicerContext[pb.UnloadModelRequest, pb.UnloadModelResponse],  # noqa: ARG002
    ) -> pb.UnloadModelResponse:
        """See admin.proto."""
        _check(request, "name", "version")
        await self._repository.unload(request.name, request.version, self._unloaded)
        _LOG.info("model %s version %s was unloaded on request", request.name, request.version)
        return pb.UnloadModelResponse()

    async def SetRouting(  # noqa: N802 - the name is the RPC's
        self,
        request: pb.SetRoutingRequest,
        context: grpc.aio.ServicerContext[pb.SetRoutingRequest, pb.Routing],  # noqa: ARG002
    ) -> pb.Routing:
        """See admin.proto."""
        _check(request, "name", "routing")
        wanted = request.routing
        routing = Routing(wanted.stable, wanted.canary, wanted.canary_share)
        await self._repository.set_routing(request.name, routing)
        _LOG.info("calls for %s go to %s", request.name, routing)
        return wanted


def _check(request: Message, *required: str) -> None:
    set_fields = {descriptor.name for descriptor, _ in request.ListFields()}
    missing = [f"{name} is not set" for name in required if name not in set_fields]
    if problems := [*unknown_fields(request), *missing]:
        raise InvalidRequestError(problems)
