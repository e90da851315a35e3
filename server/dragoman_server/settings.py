"""The server's settings: flags, or environment variables that begin with DRAGOMAN_."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


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
    slots: int = Field(64, ge=1, le=4096, description="texts decoded side by side, per model")
    max_waiting: int = Field(4096, ge=1, description="texts that may wait for a slot, per model; more are refused")
    max_texts: int = Field(1024, ge=1, description="texts of one call")
    max_encode_tokens: int = Field(
        1024, ge=1, description="padded source tokens encoded between two decode steps; bounds how long newcomers stall"
    )
    threads: int = Field(0, ge=0, description="threads per model; 0 shares the machine's cores among the models")
    drain_seconds: float = Field(30.0, ge=0, description="how long running calls may finish after SIGTERM, in seconds")

    def threads_per_model(self, num_models: int) -> int:
        """Threads of each model's graphs."""
        return self.threads or max(1, len(os.sched_getaffinity(0)) // max(num_models, 1))
