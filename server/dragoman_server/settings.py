"""The server's settings: flags, or environment variables that begin with DRAGOMAN_."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from dragoman_server.model import EngineSettings


def default_repository() -> Path:
    """The bundled models: inside an installed package, or deploy/models of a checkout."""
    package = Path(__file__).parent
    installed = package / "models"
    return installed if installed.is_dir() else package.parent.parent / "deploy" / "models"


class ServerSettings(BaseSettings):
    """Serve encoder-decoder Transformers over gRPC."""

    model_config = SettingsConfigDict(
        env_prefix="DRAGOMAN_",
        extra="forbid",
        cli_prog_name="dragoman-server",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
    )

    models: Path = Field(default_repository(), description="model repository: <name>/<version>/ inside")
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for every interface")
    port: int = Field(50051, ge=0, le=65535, description="gRPC port; 0 lets the system choose")
    metrics_port: int = Field(9464, ge=-1, le=65535, description="Prometheus port; 0 lets the system choose, -1 is off")
    precision: Literal["fp32", "int8"] | None = Field(None, description="variant to serve; the fastest if not set")
    slots: int = Field(64, ge=1, le=1024, description="rows decoded side by side, per model; a beam takes its width")
    max_waiting: int = Field(4096, ge=1, description="texts that may wait for a slot, per model; more are refused")
    max_texts: int = Field(1024, ge=1, description="texts of one call")
    max_characters: int = Field(1_000_000, ge=1, description="characters of one call, all texts together")
    max_hypotheses: int = Field(16, ge=1, description="widest beam, most alternatives, most samples of one text")
    max_encode_tokens: int = Field(
        1024, ge=1, description="source tokens encoded between two decode steps; bounds how long newcomers stall"
    )
    max_bulk_rows: int = Field(
        0, ge=0, description="rows of bulk work decoded along with interactive work; the others pause meanwhile"
    )
    instances: int = Field(0, ge=0, description="engines per model, each on its own thread; 0 chooses")
    threads: int = Field(0, ge=0, description="threads of each instance's graphs; 0 chooses")
    drain_seconds: float = Field(30.0, ge=0, description="how long running calls may finish after SIGTERM, in seconds")

    def engine_settings(self, num_models: int) -> EngineSettings:
        """How much each of `num_models` models may take, without using any core twice.

        One thread per instance and as many instances as there are cores serve most: threads of one graph wait for each
        other at every operator, instances never do. With `threads` given, instances share the cores among them.
        """
        cores = max(1, len(os.sched_getaffinity(0)) // max(num_models, 1))
        threads = self.threads or (max(1, cores // self.instances) if self.instances else 1)
        instances = min(self.instances or max(1, cores // threads), self.slots)
        return EngineSettings(
            num_slots=self.slots,
            max_waiting=self.max_waiting,
            max_encode_tokens=self.max_encode_tokens,
            max_bulk_rows=self.max_bulk_rows,
            max_hypotheses=self.max_hypotheses,
            num_instances=instances,
            num_threads=threads,
            precision=self.precision,
        )
