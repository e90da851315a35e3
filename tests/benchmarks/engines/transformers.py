"""transformers' `generate` on PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dragoman_bundle.architecture import Architecture
from dragoman_export.model import Transformer
from tests.benchmarks import CORES
from tests.benchmarks.engines import Engine, Ids, Outputs
from tests.benchmarks.stored import WEIGHTS, settings
from tests.witnesses import to_transformers


class Generator(Engine):
    """Any model with transformers' `generate`."""

    def __init__(self, model: Any, padding_id: int, end_id: int) -> None:
        self._model = model
        self._padding_id = padding_id
        self._special_ids = {padding_id, end_id}

    def decode(self, sources: Sequence[Ids], width: int, max_tokens: int) -> Outputs:
        ids = [torch.tensor(source) for source in sources]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=self._padding_id)
        options: dict[str, Any] = {"num_beams": width, "max_new_tokens": max_tokens}
        if width > 1:
            options["early_stopping"] = True
        with torch.inference_mode():
            outputs = self._model.generate(
                input_ids=padded, attention_mask=(padded != self._padding_id).long(), **options
            )
        return [[index for index in row[1:] if index not in self._special_ids] for row in outputs.tolist()]


def witness(directory: Path) -> Any:
    """The stored weights as transformers has them, in fp32."""
    stored = settings(directory)
    model = Transformer(Architecture(**stored["architecture"]))
    model.load_state_dict(torch.load(directory / WEIGHTS))
    return to_transformers(model, stored["max_tokens"])


def open_engine(directory: Path, options: Mapping[str, Any]) -> Generator:
    """Options: dtype."""
    torch.set_num_threads(CORES)
    special = settings(directory)["special_ids"]
    model = witness(directory).to(getattr(torch, options["dtype"]))
    return Generator(model, special["padding"], special["end"])
