"""Flags, environment, file: what outweighs what, and what is said of mistakes."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from dragoman_server.settings import ServerSettings


def test_a_flag_outweighs_the_environment_and_that_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "dragoman.toml"
    file.write_text('port = 1\nslots = 2\nmax_texts = 3\nhost = "::1"\n')
    monkeypatch.setenv("DRAGOMAN_PORT", "10")
    monkeypatch.setenv("DRAGOMAN_SLOTS", "20")
    settings = ServerSettings.load(["--config", str(file), "--port", "100"])
    assert (settings.port, settings.slots, settings.max_texts, settings.host) == (100, 20, 3, "::1")
    monkeypatch.setenv("DRAGOMAN_CONFIG", str(file))
    assert ServerSettings.load([]).max_texts == 3


def test_what_is_printed_can_be_read_again(tmp_path: Path) -> None:
    settings = ServerSettings.load(["--port", "7", "--latency-buckets", "[0.1, 0.2, 5]", "--admin", "--no-reflection"])
    file = tmp_path / "printed.toml"
    file.write_text(settings.to_toml())
    again = ServerSettings.load(["--config", str(file)])
    assert again.model_dump(exclude={"config"}) == settings.model_dump(exclude={"config"})
    printed = tomllib.loads(settings.to_toml())
    assert printed["latency_buckets"] == [0.1, 0.2, 5.0]
    unset = {name for name, value in settings.model_dump().items() if value is None}
    assert set(ServerSettings.model_fields) - set(printed) == {"print_config", *unset}


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "dragoman.toml"
    file.write_text("slots = 0\nports = 5\n")
    with pytest.raises(ValidationError) as caught:
        ServerSettings.load(["--config", str(file), "--port", "70000", "--latency-buckets", "[2, 1]"])
    problems = {str(error["loc"][0]): error["msg"] for error in caught.value.errors()}
    assert set(problems) == {"slots", "ports", "port", "latency_buckets"}
    assert "ascending" in problems["latency_buckets"]


def test_tls_settings_go_together() -> None:
    with pytest.raises(ValidationError, match="go together"):
        ServerSettings.load(["--tls-key", "key.pem", "--tls-client-ca", "ca.pem"])


def test_models_cannot_be_changed_by_anybody_from_anywhere() -> None:
    with pytest.raises(ValidationError, match=r"--admin on 0\.0\.0\.0 needs --api-keys"):
        ServerSettings.load(["--admin", "--host", "0.0.0.0"])  # noqa: S104 - what is refused
    assert ServerSettings.load(["--admin"]).admin


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "nowhere.toml"], "there is no file nowhere.toml"),
        (["--port", "x", "--slots", "-1"], "--slots"),
    ],
)
def test_a_wrong_call_is_exit_code_2(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "dragoman_server", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert message in result.stderr


def test_a_broken_file_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "dragoman.toml"
    file.write_text("port = = 5")
    command = [sys.executable, "-m", "dragoman_server", "--config", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "dragoman.toml" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_engine_that_is_alone_may_use_the_threads_of_all() -> None:
    given = ServerSettings.load(["--instances", "3", "--threads", "2"]).engine_settings(1)
    assert given.num_solo_threads == 6
    assert ServerSettings.load(["--solo-threads", "1"]).engine_settings(1).num_solo_threads == 1
