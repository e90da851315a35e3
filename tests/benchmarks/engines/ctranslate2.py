"""CTranslate2, with its batch spread over workers that share the cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ctranslate2

from tests.benchmarks.engines import Engine, Ids, Outputs
from tests.benchmarks.stored import settings, token


class CTranslate2(Engine):
    """A translator and the names of its tokens."""

    def __init__(self, translator: ctranslate2.Translator, vocab_size: int) -> None:
        self._translator = translator
        self._tokens = [token(index) for index in range(vocab_size)]
        self._ids = {name: index for index, name in enumerate(self._tokens)}

    def decode(self, sources: Sequence[Ids], width: int, max_tokens: int) -> Outputs:
        results = self._translator.translate_batch(
            [[self._tokens[index] for index in source] for source in sources],
            beam_size=width,
            max_decoding_length=max_tokens,
            max_batch_size=-(-len(sources) // self._translator.num_translators),
        )
        return [[self._ids[name] for name in result.hypotheses[0]] for result in results]


def open_engine(directory: Path, options: Mapping[str, Any]) -> CTranslate2:
    """Options: model (a directory inside), compute_type, inter_threads, intra_threads."""
    translator = ctranslate2.Translator(
        str(directory / options["model"]),
        compute_type=options["compute_type"],
        inter_threads=options["inter_threads"],
        intra_threads=options["intra_threads"],
    )
    return CTranslate2(translator, settings(directory)["architecture"]["vocab_size"])
