"""Real Prometheus scrapes a real server under load; rules and dashboard are evaluated by it."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dragoman_client import AsyncClient, DragomanError
from dragoman_client.types import Priority
from dragoman_server.metrics import LATENCY_BUCKETS
from tests.e2e.server_process import running_server
from tests.readme import ROOT
from tests.reversal import sentences

DEPLOY = ROOT / "deploy" / "prometheus"
DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/dragoman.json").read_text(encoding="utf-8"))
PANELS = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
EVENTS = {"Failed calls", "Errors by reason", "Work saved and repeated"}
"""Panels that may show zeros."""

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="Prometheus is not installed (Debian: apt install prometheus)",
)


@pytest.mark.parametrize("command", [["check", "rules", "rules.yml"], ["test", "rules", "rules_test.yml"]])
def test_promtool_accepts_the_rules(command: list[str]) -> None:
    result = subprocess.run(["promtool", *command], cwd=DEPLOY, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_has_a_test_and_a_runbook() -> None:
    rules, tests = (DEPLOY / "rules.yml").read_text(), (DEPLOY / "rules_test.yml").read_text()
    readme = (ROOT / "README.md").read_text(encoding="utf-8").lower()
    for alert in re.findall(r"- alert: (\w+)", rules):
        assert alert in tests, alert
    for topic in re.findall(r"runbook: \"README, Operating, (runbook: [^\"]+)\"", rules):
        assert f"**{topic}" in readme, topic


@contextmanager
def prometheus(directory: Path, target: str) -> Iterator[str]:
    """Prometheus on our configuration, but for the target's address and a shorter interval."""
    text = (DEPLOY / "prometheus.yml").read_text(encoding="utf-8")
    text = text.replace("dragoman:9464", target).replace("scrape_interval: 5s", "scrape_interval: 500ms")
    (directory / "prometheus.yml").write_text(text, encoding="utf-8")
    shutil.copy(DEPLOY / "rules.yml", directory)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [
        "prometheus",
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                urllib.request.urlopen(f"http://{address}/-/ready", timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < deadline, (directory / "log").read_text()
                time.sleep(0.1)
        yield address
    finally:
        process.kill()
        process.wait()


def ask(address: str, expression: str) -> list[dict[str, Any]]:
    """The instant vector of an expression."""
    query = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"http://{address}/api/v1/query?{query}", timeout=10) as response:
        answer = json.load(response)
    assert answer["status"] == "success"
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result


async def test_every_panel_shows_data_and_its_p99_is_what_clients_saw(reversal_models: Path, tmp_path: Path) -> None:
    texts = sentences(200, seed=8, shortest=2, longest=14)
    seen: list[float] = []
    with running_server(reversal_models) as server, prometheus(tmp_path, server.metrics_address) as address:
        async with AsyncClient(server.address) as client:

            async def caller(number: int, until: float, priority: Priority) -> None:
                while time.monotonic() < until:
                    translation = await client.translate(
                        texts[number % len(texts)], source="fwd", target="rev", priority=priority
                    )
                    if priority == "interactive":
                        seen.append(translation.timings.total)
                    number += 7

            until = time.monotonic() + 8
            callers = [caller(i, until, "interactive") for i in range(12)] + [
                caller(i, until, "bulk") for i in range(4)
            ]
            await asyncio.gather(*callers)
            with pytest.raises(DragomanError):
                await client.translate("ba", source="fwd", target="xx")
            await asyncio.sleep(1.5)
        for title, expression in PANELS:
            shown = re.sub(r"\$(model|version)", ".*", expression).replace("$__rate_interval", "20s")
            result = ask(address, shown)
            values = [float(series["value"][1]) for series in result]
            assert result, f"{title}: {shown} gives nothing"
            assert title in EVENTS or any(value == value for value in values), f"{title}: nothing but NaN"
        buckets = 'dragoman_request_seconds_bucket{priority="interactive"}'
        [p99] = ask(address, f"histogram_quantile(0.99, sum by (le) (rate({buckets}[20s])))")
        assert ask(address, 'ALERTS{alertname="DragomanDown"}') == []
    measured = sorted(seen)[int(0.99 * len(seen))]
    assert len(seen) > 200
    shown_bucket, measured_bucket = (
        bisect_left(LATENCY_BUCKETS, value) for value in (float(p99["value"][1]), measured)
    )
    assert abs(shown_bucket - measured_bucket) <= 1
