"""The contenders, a module each, which imports the libraries of that contender and no others.

Each has a function `open_engine(directory, options) -> Engine`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

Ids = Sequence[int]
Outputs = list[list[int]]


class Engine(ABC):
    """Something that decodes token ids."""

    @abstractmethod
    def decode(self, sources: Sequence[Ids], width: int, max_tokens: int) -> Outputs:
        """The best output of every source, end token not included; `width` 1 is greedy search."""

    def first_token_s(self, source: Ids) -> float:
        """Seconds until the first token of a source's greedy output is known."""
        begun = time.perf_counter()
        self.decode([source], 1, 1)
        return time.perf_counter() - begun
