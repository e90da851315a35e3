"""README.md is executed: its shell commands, its Python, and its table against the manifest."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.e2e.server_process import running_server
from tests.readme import ROOT, benchmark_table, bundled_models, quality_table, service_table, settings_table
from tests.reversal import sentences, write_pairs

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
SHELL = [line for language, block in BLOCKS if language == "sh" for line in block.splitlines()]
PYTHON = [block for language, block in BLOCKS if language == "python"]


def run(line: str, directory: Path, server: str = "") -> str:
    """Run a line as a user's shell would; commands come from this environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "DRAGOMAN_SERVER": server}
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line],
        cwd=directory, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, f"{line}\n{result.stderr}"
    return result.stdout


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [line.removeprefix("make ") for line in SHELL if line.startswith("make ")]
    assert {"demo", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_every_install_line_names_extras_that_exist() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    installs = [line for line in SHELL if line.startswith("pip ")]
    assert installs
    for line in installs:
        for extra in re.search(r"\[(.*)\]", line)[1].split(","):  # type: ignore[index]
            assert re.search(rf"^{extra} = \[", pyproject, re.MULTILINE), extra


def test_the_demo_prints_what_the_readme_shows() -> None:
    printed = subprocess.run([sys.executable, "-m", "tests.demo"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "zh→en  我爱你。  →  I love you.\n" in printed.stdout
    assert re.search("en→zh  The cat sat on the mat.  →  .*猫", printed.stdout)
    assert printed.stdout in README


def test_the_wheel_brings_the_bundled_models(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], cwd=ROOT, check=True
    )
    [wheel] = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    program = "from dragoman_server.settings import default_repository as f; print(*f().glob('*/*/manifest.json'))"
    found = run(f'PYTHONPATH="{installed}" python -c "{program}"', tmp_path).split()
    assert found == [str(path) for path in installed.glob("dragoman_server/models/*/*/manifest.json")]
    assert len(found) == len(bundled_models())


def test_the_tour_translates(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("The cat sat on the mat.\n\nI love you.\n", encoding="utf-8")
    starts = ("dragoman translate", "dragoman stream", "dragoman models", "cat ")
    commands = [line for line in SHELL if line.startswith(starts)]
    assert len(commands) == 7
    with running_server(ROOT / "deploy" / "models") as server:
        printed = [run(line, tmp_path, server.address) for line in commands]
        assert printed[0].splitlines()[0] == "I love you."
        lines = (tmp_path / "book.zh.txt").read_text(encoding="utf-8").split("\n")
        assert lines[1] == lines[3] == ""
        assert all(re.search("[\u4e00-\u9fff]", lines[i]) for i in (0, 2))
        assert all(re.search("[\u4e00-\u9fff]", printed[i]) for i in (2, 6))
        assert len(json.loads(printed[4])["segments"][0]["hypotheses"]) == 3
        programs = [program.replace("localhost:50051", server.address) for program in PYTHON]
        tour, decoding = (run(f"python - <<'EOF'\n{program}\nEOF", tmp_path).splitlines() for program in programs)
        assert tour[0] == "I love you. eos"
        assert len(tour) == 3
        assert all(line.startswith("I don't") for line in decoding[4:8])
        assert -1 < float(decoding[-1]) < 0


def test_three_commands_train_export_and_serve(tmp_path: Path) -> None:
    write_pairs(tmp_path / "my.tsv", sentences(400, seed=1))
    write_pairs(tmp_path / "my-valid.tsv", sentences(20, seed=2))
    start = SHELL.index(next(line for line in SHELL if line.startswith("dragoman-export train")))
    train, export, serve = SHELL[start : start + 3]
    run(train.replace("--max-minutes 60", "--max-steps 30 --preset tiny"), tmp_path)
    run(export, tmp_path)
    models = re.fullmatch("dragoman-server --models (.*)", serve)
    assert models
    with running_server(tmp_path / models[1]) as server:
        assert "de→en" in run("dragoman models", tmp_path, server.address)
        assert run("dragoman translate --source de --target en 'ba be'", tmp_path, server.address)


def test_the_quality_table_is_the_manifests() -> None:
    assert quality_table() in README


def test_the_benchmark_table_is_what_was_measured() -> None:
    assert benchmark_table() in README
    assert service_table() in README


def test_the_settings_table_is_the_servers() -> None:
    assert settings_table() in README


@pytest.mark.parametrize("direction", ["zh-en", "en-zh"])
def test_the_bundled_model_is_as_good_as_promised(direction: str) -> None:
    scores = {
        (score.precision, score.search): score.bleu
        for bundle in bundled_models()
        for score in bundle.manifest.quality
        if score.test_set == "valid.tatoeba.tsv" and score.direction == direction
    }
    assert scores["int8", "greedy"] >= 23
    assert scores["int8", "greedy"] >= scores["fp32", "greedy"] - 0.3
    assert scores["int8", "beam 4"] >= scores["fp32", "beam 4"] - 0.3


def test_the_bundled_models_are_small_and_proved() -> None:
    for bundle in bundled_models():
        size = sum(file.size for file in bundle.manifest.files.values())
        assert size <= 16e6 * len(bundle.manifest.directions)
        assert [variant.precision for variant in bundle.manifest.variants] == ["int8"]
        assert all(variant.parity.num_sentences >= 500 for variant in bundle.manifest.variants)
