"""Deployment files agree with the server that they deploy."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from dragoman_client import Client
from tests.e2e.server_process import ServerProcess
from tests.readme import ROOT

DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/dragoman.json").read_text(encoding="utf-8"))
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_dashboard_uses_metrics_and_labels_that_exist(expression: str, server: ServerProcess) -> None:
    with Client(server.address) as client:
        client.translate("ba be", source="fwd", target="rev")
    page = server.metrics()
    names = set(re.findall(r"(?:dragoman|process)_[a-z_]+", expression))
    assert names
    for name in names:
        assert re.search(rf"^# TYPE {re.sub('_(bucket|sum|count)$', '', name)} ", page, re.MULTILINE), name
    for label in re.findall(r"by \((.*?)\)", expression):
        for part in set(label.split(", ")) - {"instance"}:  # Prometheus' own
            assert re.search(rf'[{{,]{part}="', page), part


def test_the_server_does_not_load_pytorch() -> None:
    program = "import sys, dragoman_server.__main__, dragoman_client.__main__; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


def test_the_container_runs_what_is_installed() -> None:
    dockerfile = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
    for folder in re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.MULTILINE):
        for path in folder.split():
            assert (ROOT / path).exists(), path
    assert "USER 65532" in dockerfile


def test_the_repository_stays_small() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    assert len(files) > 50
    assert sum(path.stat().st_size for path in files if path.exists()) < 40e6
