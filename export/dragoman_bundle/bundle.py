"""A bundle on disk: reading it, and refusing one that is not exactly what its manifest says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dragoman_bundle.manifest import (
    MANIFEST,
    BundleError,
    BundleManifest,
    FileDigest,
    Variant,
    parse_manifest,
    variant_tensors,
)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A directory whose files are what its manifest says; `load_bundle` alone makes one."""

    path: Path
    manifest: BundleManifest

    def file(self, name: str) -> Path:
        """Path of one of the bundle's files."""
        assert name in self.manifest.files
        return self.path / name

    def variant(self, device: str, precision: str | None = None) -> Variant | None:
        """The variant for a device; the fastest there (int8 before fp32) if no precision is asked for."""
        matching = [v for v in self.manifest.variants if v.device == device and precision in (None, v.precision)]
        return min(matching, key=lambda v: ("int8", "fp16", "fp32").index(v.precision), default=None)


def load_bundle(path: Path) -> Bundle:
    """Read a bundle and check it.

    Raises:
        BundleError: with every problem: format version, fields, missing, changed or extra-directory files, tensors
            that do not belong to the architecture, failed parity.
    """
    try:
        text = (path / MANIFEST).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(path, [f"{MANIFEST} cannot be read: {error}"]) from error
    manifest = parse_manifest(text, path)
    if problems := [*_consistency_problems(manifest), *_file_problems(path, manifest)]:
        raise BundleError(path, problems)
    return Bundle(path, manifest)


def _consistency_problems(manifest: BundleManifest) -> Iterator[str]:
    if not manifest.variants:
        yield "it has no variant"
    if not manifest.directions:
        yield "it has no direction"
    directions = {(direction.source, direction.target) for direction in manifest.directions}
    named = {manifest.tokenizer, manifest.samples}
    for variant in manifest.variants:
        label = f"variant {variant.device}-{variant.precision}"
        named |= {variant.encoder, variant.decoder, variant.search, variant.weights}
        if not variant.parity.passed:
            yield f"{label} failed parity: {variant.parity.requirement}"
        if not variant.goldens:
            yield f"{label} has no golden outputs"
        if any((golden.source, golden.target) not in directions for golden in variant.goldens):
            yield f"{label} has golden outputs of a direction that the model does not have"
        if variant.tensors != variant_tensors(manifest.architecture, variant.cache_dtype):
            yield f"{label} has tensors that are not those of its architecture"
    for name in sorted(named - set(manifest.files)):
        yield f"file {name} has no digest"
    if not 0 <= manifest.alignment_layer < manifest.architecture.decoder_layers:
        yield f"alignment_layer {manifest.alignment_layer} is not one of {manifest.architecture.decoder_layers} layers"
    yield from _id_problems(manifest)


def _id_problems(manifest: BundleManifest) -> Iterator[str]:
    vocab_size = manifest.architecture.vocab_size
    special = manifest.special_ids
    ids = [
        special.padding,
        special.unknown,
        special.start,
        special.end,
        *(i for d in manifest.directions for i in d.source_prefix),
    ]
    if any(not 0 <= token < vocab_size for token in ids):
        yield f"a special id lies outside the vocabulary of {vocab_size}"


def _file_problems(path: Path, manifest: BundleManifest) -> Iterator[str]:
    for name, expected in manifest.files.items():
        if Path(name).name != name or name in ("", ".", ".."):
            yield f"file name {name!r} leaves the bundle"
            continue
        try:
            found = digest(path / name)
        except OSError as error:
            yield f"file {name} cannot be read: {error.strerror}"
            continue
        if found != expected:
            yield f"file {name} has changed: {_shown(found)} instead of {_shown(expected)}"


def _shown(digest: FileDigest) -> str:
    return f"{digest.size} bytes with sha256 {digest.sha256[:12]}…"


def digest(path: Path) -> FileDigest:
    """Size and sha256 of a file."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return FileDigest(size=path.stat().st_size, sha256=sha256)


@dataclass(frozen=True, slots=True)
class Samples:
    """Real sentence pairs that travel with a model; columns in the order of its first direction."""

    calibration: Sequence[tuple[str, str]]
    """From the training text: what int8 ranges are measured on."""
    parity: Sequence[tuple[str, str]]
    """From the validation text, where there is some: what graphs are compared on."""

    @classmethod
    def load(cls, path: Path) -> Samples:
        """Read what `save` wrote."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        return cls(*([(str(a), str(b)) for a, b in fields[name]] for name in ("calibration", "parity")))

    def save(self, path: Path) -> None:
        """Write as JSON."""
        fields = {"calibration": self.calibration, "parity": self.parity}
        aside = path.with_name(f".{path.name}.partial")
        aside.write_text(json.dumps(fields, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
        aside.rename(path)
