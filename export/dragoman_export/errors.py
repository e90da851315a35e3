"""What can go wrong with what a user gives; anything else is a bug and keeps its traceback.

    ExportError
    ├── CorpusError       text that cannot be used
    ├── TokenizerError    a vocabulary that cannot be trained or loaded
    ├── CheckpointError   weights that are missing, incomplete or of another model
    ├── TrainingError     a run that cannot be started or resumed
    └── ParityError       graphs that do not compute what the model computes

Two more come from the contract with the server: `dragoman_bundle.manifest.BundleError` and
`dragoman_bundle.architecture.ArchitectureError`.
"""

from __future__ import annotations


class ExportError(ValueError):
    """Base class; the message says what to change."""


class CorpusError(ExportError):
    """A corpus that cannot be used; the message says which file."""


class TokenizerError(ExportError):
    """A tokenizer that cannot be trained or loaded."""


class CheckpointError(ExportError):
    """A checkpoint that is missing, incomplete or of another architecture."""


class TrainingError(ExportError):
    """A run that cannot be started or resumed."""


class ParityError(ExportError):
    """Graphs that do not compute what the model computes; the message lists every difference."""
