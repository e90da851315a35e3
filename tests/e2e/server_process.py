"""The real server as a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class ServerProcess:
    """A running server."""

    process: subprocess.Popen[bytes]
    log_path: Path
    address: str = ""
    metrics_address: str = ""

    def log(self) -> str:
        """What it has written so far."""
        return self.log_path.read_text(encoding="utf-8")

    def stop(self, timeout_s: float = 30) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def metrics(self) -> str:
        """The metrics page."""
        with urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=10) as page:
            text: str = page.read().decode()
            return text


@contextmanager
def running_server(models: Path, *options: str) -> Iterator[ServerProcess]:
    """Start a server on ports that the system chooses; stop it at the end if it still runs."""
    with tempfile.TemporaryDirectory() as directory:
        log_path = Path(directory) / "log"
        with log_path.open("wb") as log:
            command = [sys.executable, "-m", "dragoman_server", "--models", str(models)]
            process = subprocess.Popen(
                [*command, "--port", "0", "--metrics-port", "0", *options], stdout=log, stderr=subprocess.STDOUT
            )
            server = ServerProcess(process, log_path)
            try:
                _wait_until_serving(server)
                yield server
            finally:
                process.kill()
                process.wait()


def _wait_until_serving(server: ServerProcess) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        log = server.log()
        serving = re.search(r"serving on ([\w.]+:\d+)", log)
        if serving:
            server.address = serving[1]
            metrics = re.search(r"metrics on http://([^/]+)/", log)
            server.metrics_address = metrics[1] if metrics else ""
            return
        assert server.process.poll() is None, f"the server has ended:\n{log}"
        time.sleep(0.02)
    raise AssertionError(f"the server does not serve:\n{server.log()}")
