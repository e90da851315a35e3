"""A model's files as every contender finds them; standard library only, since contenders have little in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SETTINGS = "settings.json"
WEIGHTS = "weights.pt"
CTRANSLATE2 = "ctranslate2"
CTRANSLATE2_INT8 = "ctranslate2-int8"
OPTIMUM = "optimum"
OPTIMUM_INT8 = "optimum-int8"

SPECIAL = {0: "<pad>", 1: "<unk>", 2: "<s>", 3: "</s>"}
"""Tokens with a role, as CTranslate2's vocabularies call them."""


def settings(directory: Path) -> dict[str, Any]:
    """Architecture, special ids, most tokens of a text, dtypes of our caches by precision."""
    fields: dict[str, Any] = json.loads((directory / SETTINGS).read_text(encoding="utf-8"))
    return fields


def token(index: int) -> str:
    """How a token id is called in CTranslate2's vocabularies."""
    return SPECIAL.get(index, f"t{index}")
