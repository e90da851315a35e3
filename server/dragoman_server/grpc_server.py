"""Builds the gRPC server, runs it until a signal or a failure, and drains it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from functools import partial

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, start_http_server

from dragoman_protos.v1 import translation_pb2 as pb
from dragoman_protos.v1 import translation_pb2_grpc as pb_grpc
from dragoman_server.interceptors import CallInterceptor
from dragoman_server.metrics import Metrics
from dragoman_server.model import EngineSettings, ServedModel
from dragoman_server.repository import ModelRepository, load_repository, num_models
from dragoman_server.servicer import TranslationServicer
from dragoman_server.settings import ServerSettings
from dragoman_server.validation import RequestLimits

_LOG = logging.getLogger(__name__)
_SERVICE = pb.DESCRIPTOR.services_by_name["TranslationService"].full_name
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_OPTIONS = [
    ("grpc.so_reuseport", 0),  # a taken port is an error, not a second server on it
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
]
_LINGER_S = 0.25
"""How long calls that were under way to a draining server are still told so; once it stops, gRPC only cancels them."""
_GOODBYE_S = 1.0
"""How long the last answers may take to leave."""


class Server:
    """Models, engines and the gRPC server around them.

    Args:
        settings: of the server.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.metrics = Metrics(CollectorRegistry())
        self.repository = self._load_models()
        self.port = 0
        self._health = health.aio.HealthServicer()
        self._interceptor = CallInterceptor(self.metrics)
        self._stop_requested = asyncio.Event()
        self._failure: BaseException | None = None

    def _load_models(self) -> ModelRepository:
        settings = self.settings
        engine_settings = settings.engine_settings(num_models(settings.models))
        repository = load_repository(settings.models, engine_settings, self.metrics.observer)
        for model in repository.models.values():
            self._announce(model, engine_settings)
        return repository

    def _announce(self, model: ServedModel, settings: EngineSettings) -> None:
        variant = model.variant
        self.metrics.model_info.labels(model.name, model.version, variant.device, variant.precision).set(1)
        self.metrics.slots.labels(model.name).set(settings.slots_per_instance * settings.num_instances)
        self.metrics.cache_bytes.labels(model.name).set(model.cache_bytes)
        self.metrics.batch_invariant.labels(model.name).set(variant.parity.batch_invariant)
        _LOG.info(
            "model %s version %s: %s, %d slots, %d instances of %d threads, %.0f MiB reserved for caches",
            model.name,
            model.version,
            variant.precision,
            settings.slots_per_instance * settings.num_instances,
            settings.num_instances,
            settings.num_threads,
            model.cache_bytes / 2**20,
        )

    async def run(self) -> int:
        """Serve until `stop` is called, a signal comes or an engine dies.

        Returns:
            The process's exit code: 0 after an orderly stop, 1 after a failure.
        """
        metrics_server = self._start_metrics()
        server = self._build()
        self._start_engines()
        await server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        _LOG.info("serving on %s:%d", self.settings.host, self.port)
        await self._wait_for_stop()
        await self._drain(server)
        if metrics_server is not None:
            metrics_server()
        return 0 if self._failure is None else 1

    def stop(self) -> None:
        """Ask the server to drain and stop; call it on the event loop."""
        self._stop_requested.set()

    def _build(self) -> grpc.aio.Server:
        settings = self.settings
        server = grpc.aio.server(interceptors=[self._interceptor], options=_OPTIONS)
        servicer = TranslationServicer(self.repository, RequestLimits(settings.max_texts, settings.max_characters))
        pb_grpc.add_TranslationServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((_SERVICE, _HEALTH, reflection.SERVICE_NAME), server)
        self.port = server.add_insecure_port(f"{settings.host}:{settings.port}")
        return server

    def _start_engines(self) -> None:
        loop = asyncio.get_running_loop()
        for model in self.repository.models.values():
            model.engine.on_death = partial(self._engine_failed, loop)
            model.engine.start()

    def _engine_failed(self, loop: asyncio.AbstractEventLoop, cause: BaseException) -> None:
        loop.call_soon_threadsafe(self._engine_died, cause)  # called on the engine's thread

    def _engine_died(self, cause: BaseException) -> None:
        _LOG.critical("an engine has failed; the server stops", exc_info=cause)
        self._failure = cause
        self._stop_requested.set()

    def _start_metrics(self) -> Callable[[], None] | None:
        if self.settings.metrics_port < 0:
            return None
        server, thread = start_http_server(self.settings.metrics_port, self.settings.host, self.metrics.registry)
        self.metrics_port = server.server_port
        _LOG.info("metrics on http://%s:%d/metrics", self.settings.host, self.metrics_port)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return stop

    async def _set_health(self, status: int) -> None:
        for service in ("", _SERVICE):
            await self._health.set(service, status)

    async def _wait_for_stop(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            await self._stop_requested.wait()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def _drain(self, server: grpc.aio.Server) -> None:
        """Stop being chosen, let running calls end, then stop."""
        _LOG.info("stopping: running calls have %g s to end", self.settings.drain_seconds)
        await self._health.enter_graceful_shutdown()
        await self._interceptor.drain(self.settings.drain_seconds)
        await asyncio.sleep(_LINGER_S)
        for model in self.repository.models.values():
            model.engine.stop()  # whoever still waits is told that the server is shutting down
        await server.stop(_GOODBYE_S)
