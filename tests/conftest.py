"""Fixtures that cost seconds are made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from dragoman_bundle.bundle import Bundle, load_bundle
from tests.reversal import export_reversal, train_reversal

REPOSITORY_ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def reversal_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished training run of the toy language pair."""
    return train_reversal(tmp_path_factory.mktemp("reversal") / "training")


@pytest.fixture(scope="session")
def reversal_models(reversal_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model repository with the toy model, in fp32, int8 and fp16."""
    return export_reversal(reversal_run, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def reversal_bundle(reversal_models: Path) -> Bundle:
    """The toy model's bundle."""
    return load_bundle(reversal_models / "reversal" / "1")
