from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server_process import ServerProcess, running_server


@pytest.fixture(scope="session")
def server(reversal_models: Path) -> Iterator[ServerProcess]:
    """A server with the toy model in int8, shared by tests that leave it as it was."""
    with running_server(reversal_models) as process:
        yield process


@pytest.fixture(scope="session")
def admin_server(reversal_models: Path) -> Iterator[ServerProcess]:
    """A server whose models may be loaded, unloaded and routed at will."""
    with running_server(reversal_models, "--admin") as process:
        yield process
