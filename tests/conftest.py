"""Fixtures that cost seconds are made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from dragoman_bundle.bundle import Bundle, load_bundle
from dragoman_bundle.manifest import Limits
from dragoman_export.commands import export_run
from dragoman_export.options import VARIANT_KINDS
from tests.reversal import train_reversal

REPOSITORY_ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def reversal_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished training run of the toy language pair."""
    return train_reversal(tmp_path_factory.mktemp("reversal") / "training")


@pytest.fixture(scope="session")
def reversal_models(reversal_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model repository with the toy model, in fp32, int8 and fp16."""
    models = tmp_path_factory.mktemp("models")
    kinds = [VARIANT_KINDS[name] for name in ("cpu-fp32", "cpu-int8", "cuda-fp16")]
    limits = Limits(max_source_tokens=64, max_target_tokens=64)
    export_run(reversal_run, models / "reversal" / "1", "reversal", kinds, limits, [], lambda _: None)
    return models


@pytest.fixture(scope="session")
def reversal_bundle(reversal_models: Path) -> Bundle:
    """The toy model's bundle."""
    return load_bundle(reversal_models / "reversal" / "1")
