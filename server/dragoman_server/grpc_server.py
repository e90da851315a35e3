"""Builds the gRPC server, runs it until a signal or a failure, and drains it."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, start_http_server

from dragoman_protos.v1 import admin_pb2, admin_pb2_grpc
from dragoman_protos.v1 import translation_pb2 as pb
from dragoman_protos.v1 import translation_pb2_grpc as pb_grpc
from dragoman_server.access import KeyRing
from dragoman_server.admin import AdminServicer
from dragoman_server.exposure import exposures
from dragoman_server.gates import CertificateGate, KeyGate
from dragoman_server.interceptors import CallInterceptor, Gate, OpenGate
from dragoman_server.metrics import Metrics
from dragoman_server.model import ServedModel, load_model
from dragoman_server.repository import ModelRepository, num_models
from dragoman_server.servicer import TranslationServicer
from dragoman_server.settings import ServerSettings
from dragoman_server.tls import server_credentials
from dragoman_server.tracing import NoTracing, OpenTelemetry, Tracing
from dragoman_server.validation import RequestLimits

_LOG = logging.getLogger(__name__)
_SERVICE = pb.DESCRIPTOR.services_by_name["TranslationService"].full_name
_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_MAX_PENDING = 100_000

_OPTIONS = [
    ("grpc.so_reuseport", 0),  # a taken port is an error, not a second server on it
    # Clients ping an idle connection to notice a dead server; gRPC would take that for an attack.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Past a thousand calls that wait for Python, gRPC itself would cancel some, without a reason. The line decides.
    ("grpc.server.max_pending_requests", _MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING),
]
_LINGER_S = 0.25
"""How long calls that were under way to a draining server are still told so; once it stops, gRPC only cancels them."""
_GOODBYE_S = 1.0
"""How long the last answers may take to leave."""
_WATCH_S = 1.0
"""Between two looks at the engines."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StuckError(Exception):
    """A step does not end."""


class Server:
    """Models, engines and the gRPC server around them.

    Args:
        settings: of the server.
        tracing: that follows calls; None for what the settings say.
    """

    def __init__(self, settings: ServerSettings, tracing: Tracing | None = None) -> None:
        self.settings = settings
        self.metrics = Metrics(CollectorRegistry(), settings.latency_buckets)
        self.tracing = tracing or (OpenTelemetry() if settings.tracing else NoTracing())
        self.gate = _gate(settings)
        self._credentials = _credentials(settings)
        self._loop = asyncio.get_running_loop()
        engine_settings = settings.engine_settings(num_models(settings.models))
        load = partial(load_model, settings=engine_settings, observe=self.metrics.observer)
        self.repository = ModelRepository(settings.models, load)
        self.repository.load_all()
        self.port = 0
        self._health = health.aio.HealthServicer()
        self._interceptor = CallInterceptor(self.metrics, self.gate, self.tracing, logs_calls=settings.log_requests)
        self._stop_requested = asyncio.Event()
        self._failure: BaseException | None = None

    def _start_model(self, model: ServedModel) -> None:
        """Make a model decode, and announce it."""
        # Called on the engine's thread.
        model.engine.on_death = lambda cause: self._loop.call_soon_threadsafe(self._engine_died, cause)
        model.engine.start()
        variant, settings = model.variant, model.settings
        of, metrics = (model.name, model.version), self.metrics
        metrics.model_info.labels(*of, variant.device, variant.precision).set(1)
        metrics.slots.labels(*of).set(model.num_slots)
        metrics.queue_limit.labels(*of).set(settings.max_waiting)
        metrics.cache_bytes.labels(*of).set(model.cache_bytes)
        metrics.batch_invariant.labels(*of).set(variant.parity.batch_invariant)
        _LOG.info(
            "model %s version %s: %s-%s, %d slots, %d instances of %d threads, %.0f MiB reserved for caches",
            *of,
            variant.device,
            variant.precision,
            model.num_slots,
            settings.num_instances,
            settings.num_threads,
            model.cache_bytes / 2**20,
        )

    def _forget_model(self, model: ServedModel) -> None:
        self.metrics.forget(model.name, model.version)

    async def run(self) -> int:
        """Serve until `stop` is called, a signal comes or an engine dies.

        Returns:
            The process's exit code: 0 after an orderly stop, 1 after a failure.
        """
        stop_metrics = self._start_metrics()
        server = self._build()
        for model in self.repository:
            self._start_model(model)
        await server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        _LOG.info("serving on %s:%d", self.settings.host, self.port)
        await self._wait_for_stop()
        await self._drain(server)
        stop_metrics()
        return 0 if self._failure is None else 1

    def stop(self) -> None:
        """Ask the server to drain and stop; call it on the event loop."""
        self._stop_requested.set()

    def _build(self) -> grpc.aio.Server:
        settings = self.settings
        size = settings.max_message_bytes
        server = grpc.aio.server(
            interceptors=[*self._tracing_interceptors(), self._interceptor],
            options=[*_OPTIONS, ("grpc.max_receive_message_length", size), ("grpc.max_send_message_length", -1)],
        )
        servicer = TranslationServicer(self.repository, RequestLimits(settings.max_texts, settings.max_characters))
        pb_grpc.add_TranslationServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        services = [_SERVICE, _HEALTH]
        if settings.admin:
            admin = AdminServicer(self.repository, self._start_model, self._forget_model)
            admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)  # type: ignore[no-untyped-call]
            services.append(_ADMIN)
        if settings.reflection:
            reflection.enable_server_reflection((*services, reflection.SERVICE_NAME), server)
        address = f"{settings.host}:{settings.port}"
        if self._credentials is None:
            self.port = server.add_insecure_port(address)
        else:
            self.port = server.add_secure_port(address, self._credentials)
        self._say_what_is_open()
        return server

    def _say_what_is_open(self) -> None:
        settings = self.settings
        for exposure in exposures(
            settings.host,
            has_tls=settings.tls_certificate is not None,
            has_client_ca=settings.tls_client_ca is not None,
            has_keys=settings.api_keys is not None,
        ):
            _LOG.warning("%s", exposure)

    def _tracing_interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        return [self.tracing.interceptor()] if isinstance(self.tracing, OpenTelemetry) else []

    def _engine_died(self, cause: BaseException) -> None:
        if self._failure is not None:
            return
        _LOG.critical("an engine has failed; the server stops", exc_info=cause)
        self._failure = cause
        self._stop_requested.set()

    def _start_metrics(self) -> Callable[[], None]:
        if self.settings.metrics_port < 0:
            return lambda: None
        host = self.settings.metrics_host or self.settings.host
        try:
            server, thread = start_http_server(self.settings.metrics_port, host, self.metrics.registry)
        except OSError as error:
            where = f"{host}:{self.settings.metrics_port}"
            raise OSError(f"metrics cannot be served on {where} (--metrics-port): {error.strerror}") from error
        self.metrics_port = server.server_port
        _LOG.info("metrics on http://%s:%d/metrics", host, self.metrics_port)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return stop

    async def _set_health(self, status: int) -> None:
        for service in ("", _SERVICE):
            await self._health.set(service, status)

    async def _wait_for_stop(self) -> None:
        for number in _STOP_SIGNALS:
            self._loop.add_signal_handler(number, self._on_signal)
        watchdog = asyncio.create_task(self._watch())
        try:
            await self._stop_requested.wait()
        finally:
            watchdog.cancel()

    def _on_signal(self) -> None:
        """The first signal drains, the second one stops at once."""
        if not self._stop_requested.is_set():
            self.stop()
            return
        _LOG.warning("a second signal: stopping at once; running calls are lost")
        sys.stderr.flush()
        os._exit(1)

    async def _watch(self) -> None:
        """Look after the engines: a step that never ends would hang everybody."""
        limit = self.settings.watchdog_seconds
        while limit:
            await asyncio.sleep(min(_WATCH_S, limit / 4))
            for model in self.repository:
                if model.engine.is_alive and (seconds := model.engine.longest_step()) > limit:
                    _LOG.critical("a step of %s has not ended for %.1f s; where every thread is:", model.name, seconds)
                    faulthandler.dump_traceback(sys.stderr)
                    model.engine.give_up(StuckError(f"a step has not ended for {seconds:.1f} s (--watchdog-seconds)"))

    async def _drain(self, server: grpc.aio.Server) -> None:
        """Stop being chosen, let running calls end, then stop."""
        _LOG.info("stopping: running calls have %g s to end", self.settings.drain_seconds)
        await self._health.enter_graceful_shutdown()
        await self._interceptor.drain(self.settings.drain_seconds)
        await asyncio.sleep(_LINGER_S)
        for model in self.repository:
            model.engine.stop()  # whoever still waits is told that the server is shutting down
        await server.stop(_GOODBYE_S)
        for number in _STOP_SIGNALS:
            self._loop.remove_signal_handler(number)
        if isinstance(self.tracing, OpenTelemetry):
            self.tracing.stop()


def _gate(settings: ServerSettings) -> Gate:
    """Keys outweigh certificates: where both are set, TLS asks for the one and the gate for the other."""
    if settings.api_keys is not None:
        return KeyGate(KeyRing(settings.api_keys))
    return OpenGate() if settings.tls_client_ca is None else CertificateGate()


def _credentials(settings: ServerSettings) -> grpc.ServerCredentials | None:
    if settings.tls_certificate is None or settings.tls_key is None:
        return None
    return server_credentials(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
