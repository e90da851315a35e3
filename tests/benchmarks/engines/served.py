"""A bundle as `dragoman-server` loads it: every file's digest, graphs, caches, golden requests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dragoman_server.model import load_model
from dragoman_server.settings import ServerSettings
from tests.benchmarks.engines.dragoman import Dragoman


def _nobody(*_: object) -> None:
    """Observes the engines."""


def open_engine(directory: Path, _options: Mapping[str, Any]) -> Dragoman:
    """`directory` is the bundle's; there are no options."""
    settings = ServerSettings.model_validate({}).engine_settings(1)
    return Dragoman(load_model(directory, settings, _nobody).engine)
