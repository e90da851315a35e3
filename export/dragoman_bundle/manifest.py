"""`manifest.json`: everything a server must know of a model besides its weights, and the proof that it is right."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from dragoman_bundle import tensors
from dragoman_bundle.architecture import Architecture
from dragoman_bundle.strict_json import read
from dragoman_bundle.tensors import DType, TensorSpec

FORMAT_VERSION: Final = 1
MANIFEST: Final = "manifest.json"

Device = Literal["cpu", "cuda"]
Precision = Literal["fp32", "int8", "fp16"]


class BundleError(ValueError):
    """A bundle that must not be served; the message lists every problem that was found."""

    def __init__(self, path: Path, problems: list[str]) -> None:
        self.path = path
        self.problems = problems
        super().__init__(f"the bundle {path} is refused:\n" + "\n".join(f"- {problem}" for problem in problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialIds:
    """Token ids with a role."""

    padding: int
    unknown: int
    start: int
    """The first decoder input."""
    end: int
    """Ends a source and a target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectionSpec:
    """One translation direction that a model serves."""

    source: str
    """BCP 47 tag."""
    target: str
    """BCP 47 tag."""
    source_prefix: tuple[int, ...]
    """Token ids that open the source; they tell a bilingual model where to go."""

    def wrap_source(self, ids: list[int], end_id: int) -> list[int]:
        """Token ids as the encoder wants them: prefix, pieces, end token."""
        return [*self.source_prefix, *ids, end_id]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes beyond which the model does not work, in tokens."""

    max_source_tokens: int
    """Prefix and end token included."""
    max_target_tokens: int
    """End token not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedLength:
    """Default bound on a translation's length: factor * source tokens + extra tokens."""

    factor: float
    extra: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """What a file of the bundle must be."""

    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """How a variant's graphs compare with PyTorch."""

    reference: str
    """What they were compared with."""
    num_sentences: int
    """Real sentences, decoded greedily by both."""
    num_identical: int
    """Of these, how many gave the same tokens."""
    max_abs_logit_difference: float
    """Over every position, teacher-forced on the reference's tokens."""
    top1_agreement: float
    """Share of these positions at which the most probable token is the same."""
    batch_invariant: bool
    """Whether tokens were the same at every batch size and padding that was tried."""
    batch_sizes: tuple[int, ...]
    passed: bool
    requirement: str
    """What had to hold to pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """A request and the answer a correct server gives, chosen where no rounding can tip a decision."""

    source: str
    target: str
    text: str
    token_ids: tuple[int, ...]
    """Of the greedy translation, without the end token."""
    translation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDescription:
    """A `TensorSpec` as JSON."""

    name: str
    dtype: str
    axes: tuple[str | int, ...]

    @classmethod
    def of(cls, spec: TensorSpec) -> TensorDescription:
        """From a spec."""
        return cls(name=spec.name, dtype=spec.dtype, axes=spec.axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One compiled form of the model: graphs for a device at a precision."""

    device: Device
    precision: Precision
    encoder: str
    """File name of the encoder graph."""
    decoder: str
    """File name of the decode-step graph."""
    search: str
    """File name of the search graph."""
    weights: str
    """File name of the weights that both graphs share."""
    cache_dtype: DType
    parity: ParityReport
    goldens: tuple[Golden, ...]
    tensors: dict[str, tuple[TensorDescription, ...]]
    """Inputs and outputs of each graph, under encoder_inputs, encoder_outputs and so on."""
    rows: str | None = None
    """File name of the graph that copies rows between caches; variants for the CPU need none."""

    @property
    def graphs(self) -> tuple[str, ...]:
        """File names of all its graphs."""
        return self.encoder, self.decoder, self.search, *([self.rows] if self.rows else [])


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityScore:
    """Quality of one variant on one test set."""

    test_set: str
    direction: str
    precision: str
    search: str
    bleu: float
    chrf: float
    signature: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleManifest:
    """The contract between export and server."""

    format_version: int
    name: str
    architecture: Architecture
    tokenizer: str
    """File name of the SentencePiece model."""
    special_ids: SpecialIds
    directions: tuple[DirectionSpec, ...]
    limits: Limits
    generated_length: GeneratedLength
    alignment_layer: int
    """Decoder layer whose cross-attention says best which source token a target token comes from."""
    variants: tuple[Variant, ...]
    files: dict[str, FileDigest]
    """Every file of the bundle but the manifest."""
    samples: str
    """File name of the sentences that calibration and parity used."""
    quality: tuple[QualityScore, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)
    """Training data, cleaning and options, for readers."""

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"


def variant_tensors(
    arch: Architecture, cache_dtype: DType, *, has_rows: bool = False
) -> dict[str, tuple[TensorDescription, ...]]:
    """What `Variant.tensors` must be for an architecture; `has_rows` if the variant has a rows graph."""
    specs = {
        "encoder_inputs": tensors.encoder_inputs(),
        "encoder_outputs": tensors.encoder_outputs(arch, cache_dtype),
        "decoder_inputs": tensors.decoder_inputs(arch, cache_dtype),
        "decoder_outputs": tensors.decoder_outputs(arch, cache_dtype),
        "search_inputs": tensors.search_inputs(arch),
        "search_outputs": tensors.search_outputs(),
    }
    if has_rows:
        specs["rows_inputs"] = tensors.rows_inputs(arch, cache_dtype)
        specs["rows_outputs"] = tensors.rows_outputs(arch, cache_dtype)
    return {name: tuple(TensorDescription.of(spec) for spec in group) for name, group in specs.items()}


def parse_manifest(text: str, path: Path) -> BundleManifest:
    """Read a manifest.

    Raises:
        BundleError: it is not JSON, of an unknown format version, or has unknown, missing or wrong fields.
    """
    try:
        return _build_manifest(_parse_json(text, path), path)
    except RecursionError as error:
        raise BundleError(path, [f"{MANIFEST} is nested too deeply"]) from error


def _parse_json(text: str, path: Path) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BundleError(path, [f"{MANIFEST} is not JSON: {error}"]) from error


def _build_manifest(fields: object, path: Path) -> BundleManifest:
    version = fields.get("format_version") if isinstance(fields, dict) else None
    if version != FORMAT_VERSION:
        problem = f"{MANIFEST} has format_version {version!r}; Dragoman reads {FORMAT_VERSION}: export the model again"
        raise BundleError(path, [problem])
    problems: list[str] = []
    manifest = read(BundleManifest, fields, "manifest", problems)
    if manifest is None or problems:
        raise BundleError(path, problems)
    return manifest
