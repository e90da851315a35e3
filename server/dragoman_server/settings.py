"""The server's settings: flags, environment variables that begin with DRAGOMAN_, and one TOML file."""

from __future__ import annotations

import argparse
import json
import os
import tomllib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from dragoman_server.exposure import is_loopback
from dragoman_server.metrics import LATENCY_BUCKETS
from dragoman_server.model import EngineSettings

CONFIG_VARIABLE = "DRAGOMAN_CONFIG"
_FEWEST_BUCKETS = 2


def default_repository() -> Path:
    """The bundled models: inside an installed package, or deploy/models of a checkout."""
    package = Path(__file__).parent
    installed = package / "models"
    return installed if installed.is_dir() else package.parent.parent / "deploy" / "models"


class ServerSettings(BaseSettings):
    """Serve encoder-decoder Transformers over gRPC.

    A flag outweighs an environment variable (DRAGOMAN_PORT for --port), which outweighs the file given by --config.
    """

    model_config = SettingsConfigDict(
        env_prefix="DRAGOMAN_",
        extra="forbid",
        cli_prog_name="dragoman-server",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
    )

    config: Path | None = Field(None, description="TOML file with any of these settings, such as port = 50051")
    print_config: bool = Field(False, description="print the settings in effect as TOML, and end")

    models: Path = Field(default_repository(), description="model repository: <name>/<version>/ inside")
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for every interface")
    port: int = Field(50051, ge=0, le=65535, description="gRPC port; 0 lets the system choose")
    metrics_host: str | None = Field(None, description="address of the metrics; the same as --host if not set")
    metrics_port: int = Field(9464, ge=-1, le=65535, description="Prometheus port; 0 lets the system choose, -1 is off")
    reflection: bool = Field(True, description="whether clients may ask what services there are")
    admin: bool = Field(False, description="whether models can be loaded, unloaded and routed over gRPC")

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where models run; auto prefers CUDA")
    precision: Literal["fp32", "int8", "fp16"] | None = Field(
        None, description="variant to serve; the fastest if not set"
    )
    slots: int = Field(64, ge=1, le=1024, description="rows decoded side by side, per model; a beam takes its width")
    memory_mib: int = Field(
        0, ge=0, description="memory for a model's caches, in MiB: as many slots as fit, at most --slots; 0 is no limit"
    )
    instances: int = Field(0, ge=0, description="engines per model, each on its own thread; 0 chooses")
    threads: int = Field(0, ge=0, description="threads of each instance's graphs; 0 chooses")
    solo_threads: int = Field(
        0,
        ge=0,
        description="threads of a large model's graphs while one instance alone has work; 0: all, 1: off",
    )
    max_waiting: int = Field(
        4096, ge=1, description="texts of each priority that may wait for a slot, per model; more are refused"
    )
    max_waiting_tokens: int = Field(
        1_000_000, ge=1, description="their source tokens, once for every row of a beam; more are refused"
    )
    max_texts: int = Field(1024, ge=1, description="texts of one call")
    max_characters: int = Field(1_000_000, ge=1, description="characters of one call, all texts together")
    max_message_bytes: int = Field(
        16 * 2**20, ge=1024, description="size of one message, in bytes; larger ones are refused unread"
    )
    max_hypotheses: int = Field(16, ge=1, description="widest beam, most alternatives, most samples of one text")
    max_encode_tokens: int = Field(
        1024, ge=1, description="source tokens encoded between two decode steps; bounds how long newcomers stall"
    )
    max_encode_ms: float = Field(
        0.0, ge=0, description="time that newcomers may stall running texts, in ms; lowers the tokens above; 0 is off"
    )
    max_bulk_rows: int = Field(
        0, ge=0, description="rows of bulk work decoded along with interactive work; the others pause meanwhile"
    )

    tls_certificate: Path | None = Field(None, description="PEM file: serve TLS; read again when it changes")
    tls_key: Path | None = Field(None, description="PEM file with the certificate's key")
    tls_client_ca: Path | None = Field(None, description="PEM file: only clients with a certificate from it (mTLS)")
    api_keys: Path | None = Field(None, description="TOML file with hashed keys: only callers with one of them")

    drain_seconds: float = Field(30.0, ge=0, description="how long running calls may finish after SIGTERM, in seconds")
    watchdog_seconds: float = Field(
        60.0, ge=0, description="a step that takes longer is taken for stuck: the process ends; 0 waits for ever"
    )
    log_format: Literal["text", "json"] = Field("text", description="of the log on stderr")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least urgent line to log")
    log_requests: bool = Field(False, description="a line for every call; never with its text")
    latency_buckets: list[float] = Field(
        list(LATENCY_BUCKETS), description="upper bounds of latency histograms, in seconds, ascending"
    )
    tracing: bool = Field(False, description="OpenTelemetry traces over OTLP; OTEL_* variables configure the exporter")

    @field_validator("latency_buckets")
    @classmethod
    def _ascends(cls, value: list[float]) -> list[float]:
        if len(value) < _FEWEST_BUCKETS or any(a >= b for a, b in pairwise(value)):
            raise ValueError("it must be at least two bounds, in ascending order")
        return value

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if problems := list(self._contradictions()):
            raise ValueError("; ".join(problems))
        return self

    def _contradictions(self) -> Iterator[str]:
        if (self.tls_certificate is None) != (self.tls_key is None):
            yield "--tls-certificate and --tls-key go together"
        if self.tls_client_ca is not None and self.tls_certificate is None:
            yield "--tls-client-ca needs --tls-certificate"
        if self.admin and self.api_keys is None and not is_loopback(self.host):
            yield f"--admin on {self.host} needs --api-keys: anybody could replace the models"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - no hidden file is read
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags come with the init settings; the file comes last."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @classmethod
    def load(cls, arguments: Sequence[str]) -> Self:
        """The settings in effect.

        Args:
            arguments: of the command line.

        Raises:
            pydantic.ValidationError: listing every problem.
            SettingsError: a variable cannot be read.
            ValueError: the file cannot be read.
        """
        path = _config_path(arguments)
        if path is not None:
            _check_file(path)

        class Configured(cls):  # type: ignore[valid-type, misc]
            model_config = SettingsConfigDict(toml_file=path)

        Configured.__doc__ = cls.__doc__  # it heads --help
        settings: Self = Configured(_cli_parse_args=list(arguments))
        return settings

    def to_toml(self) -> str:
        """As a file for --config; what is not set is left out."""
        shown = self.model_dump(mode="json", exclude={"config", "print_config"}, exclude_none=True)
        return "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in shown.items())

    def engine_settings(self, num_models: int) -> EngineSettings:
        """How much each of `num_models` models may take, without using any core twice.

        One thread per instance and as many instances as there are cores serve most: threads of one graph wait for each
        other at every operator, instances never do. With `threads` given, instances share the cores among them. An
        instance that has the model to itself may use the threads of all.
        """
        cores = max(1, len(os.sched_getaffinity(0)) // max(num_models, 1))
        threads = self.threads or (max(1, cores // self.instances) if self.instances else 1)
        instances = min(self.instances or max(1, cores // threads), self.slots)
        return EngineSettings(
            num_slots=self.slots,
            memory_bytes=self.memory_mib * 2**20,
            max_waiting=self.max_waiting,
            max_waiting_tokens=self.max_waiting_tokens,
            max_encode_tokens=self.max_encode_tokens,
            max_encode_s=self.max_encode_ms / 1000,
            max_bulk_rows=self.max_bulk_rows,
            max_hypotheses=self.max_hypotheses,
            num_instances=instances,
            num_threads=threads,
            num_solo_threads=self.solo_threads or instances * threads,
            device=self.device,
            precision=self.precision,
        )


def _check_file(path: Path) -> None:
    try:
        tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}, which --config or {CONFIG_VARIABLE} names") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _config_path(arguments: Sequence[str]) -> Path | None:
    """Where the file is has to be known before the other settings can be read."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    known, _ = parser.parse_known_args(list(arguments))
    path = known.config or os.environ.get(CONFIG_VARIABLE)
    return Path(path) if path else None
