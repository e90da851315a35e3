"""A bundle on disk: reading it, and refusing one that is not exactly what its manifest says."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dragoman_bundle.graph_file import ExternalTensor, GraphFileError, read_references
from dragoman_bundle.manifest import (
    MANIFEST,
    BundleError,
    BundleManifest,
    FileDigest,
    Variant,
    parse_manifest,
    variant_tensors,
)

_MAX_MANIFEST_BYTES: Final = 16 * 2**20
_MAX_GRAPH_BYTES: Final = 256 * 2**20
"""Of one graph without its weights, which lie in a file of their own."""
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")
_DOMAINS: Final = {"", "ai.onnx", "com.microsoft"}
"""Whose operators ONNX Runtime has built in; any other would need a library of custom operators."""
_LARGEST_LENGTH: Final = 2**31 - 1
"""Lengths are int32 in the graphs."""


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
    """Read a bundle and check it; nothing in it is executed, and no byte outside its directory is read.

    Raises:
        BundleError: with every problem: format version, fields, missing or changed files, files and links that leave
            the directory, graphs that name files the manifest does not list or operators that are not built in,
            tensors that do not belong to the architecture, failed parity.
    """
    manifest = parse_manifest(_read_manifest(path), path)
    by_file = {name: list(_file_problems(path, name, expected)) for name, expected in manifest.files.items()}
    problems = [*_consistency_problems(manifest), *(problem for found in by_file.values() for problem in found)]
    graphs = {graph for variant in manifest.variants for graph in variant.graphs}
    for graph in sorted(graphs):
        if by_file.get(graph) == []:
            problems += _graph_problems(path, graph, manifest.files)
    if problems:
        raise BundleError(path, problems)
    return Bundle(path, manifest)


def _read_manifest(path: Path) -> str:
    try:
        problem = _place_problem(path, MANIFEST)
        size = (path / MANIFEST).stat().st_size
        if problem is None and size > _MAX_MANIFEST_BYTES:
            problem = f"has {size} bytes, at most {_MAX_MANIFEST_BYTES} are read"
        if problem is None:
            return (path / MANIFEST).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(path, [f"{MANIFEST} cannot be read: {error}"]) from error
    raise BundleError(path, [f"{MANIFEST} {problem}"])


def _consistency_problems(manifest: BundleManifest) -> Iterator[str]:
    if not manifest.variants:
        yield "it has no variant"
    if not manifest.directions:
        yield "it has no direction"
    directions = {(direction.source, direction.target) for direction in manifest.directions}
    named = {manifest.tokenizer, manifest.samples}
    for variant in manifest.variants:
        label = f"variant {variant.device}-{variant.precision}"
        named |= {*variant.graphs, variant.weights}
        if not variant.parity.passed:
            yield f"{label} failed parity: {variant.parity.requirement}"
        if not variant.goldens:
            yield f"{label} has no golden outputs"
        if any((golden.source, golden.target) not in directions for golden in variant.goldens):
            yield f"{label} has golden outputs of a direction that the model does not have"
        if not _has_the_tensors_of_its_architecture(variant, manifest):
            yield f"{label} has tensors that are not those of its architecture"
    for name in sorted(named - set(manifest.files)):
        yield f"file {name} has no digest"
    if not 0 <= manifest.alignment_layer < manifest.architecture.decoder_layers:
        yield f"alignment_layer {manifest.alignment_layer} is not one of {manifest.architecture.decoder_layers} layers"
    yield from _id_problems(manifest)
    yield from _length_problems(manifest)


def _has_the_tensors_of_its_architecture(variant: Variant, manifest: BundleManifest) -> bool:
    # Their number comes first: the tensors of a billion layers would take all memory to write down.
    num_listed = len(variant.tensors.get("encoder_outputs", ()))
    if num_listed != 2 * manifest.architecture.decoder_layers:
        return False
    has_rows = variant.rows is not None
    return variant.tensors == variant_tensors(manifest.architecture, variant.cache_dtype, has_rows=has_rows)


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


def _length_problems(manifest: BundleManifest) -> Iterator[str]:
    for name in ("max_source_tokens", "max_target_tokens"):
        if not 1 <= (length := getattr(manifest.limits, name)) <= _LARGEST_LENGTH:
            yield f"limits.{name} is {length}, it must be 1 to {_LARGEST_LENGTH}"
    generated = manifest.generated_length
    for name, most in (("factor", 1e6), ("extra", _LARGEST_LENGTH)):
        if not 0 <= (length := getattr(generated, name)) <= most:
            yield f"generated_length.{name} is {length}, it must be 0 to {most:g}"


def _file_problems(path: Path, name: str, expected: FileDigest) -> Iterator[str]:
    """What is wrong with one of the files that the manifest lists."""
    if Path(name).name != name or name in ("", ".", ".."):
        yield f"file name {name!r} leaves the bundle"
        return
    if not _FILE_NAME.fullmatch(name):
        yield f"file name {name!r} is not made of at most 200 letters, digits, '_', '.', '+' and '-'"
        return
    try:
        problem = _place_problem(path, name)
        size = (path / name).stat().st_size
        if problem is None and size != expected.size:  # a file of another size need not be read
            problem = f"has changed: {size} bytes instead of {expected.size}"
        elif problem is None and digest(path / name) != expected:
            problem = f"has changed: its sha256 is not {expected.sha256[:12]}…"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    if problem is not None:
        yield f"file {name} {problem}"


def _place_problem(path: Path, name: str) -> str | None:
    """Why a name in the bundle's directory must not be opened; None if it may."""
    place = Path(os.path.realpath(path / name, strict=True))
    if not place.is_relative_to(os.path.realpath(path)):
        return "is a link that leaves the bundle"
    if not stat.S_ISREG(place.stat().st_mode):
        return "is not a regular file"
    return None


def _graph_problems(path: Path, name: str, files: dict[str, FileDigest]) -> Iterator[str]:
    """Why a graph must not be given to ONNX Runtime."""
    if not name.endswith(".onnx"):
        yield f"graph {name} does not end in .onnx"  # for another ending ONNX Runtime may choose another format
        return
    if files[name].size > _MAX_GRAPH_BYTES:
        yield f"graph {name} has {files[name].size} bytes, at most {_MAX_GRAPH_BYTES} are read; move its weights out"
        return
    try:
        references = read_references((path / name).read_bytes())
    except GraphFileError as error:
        yield f"graph {name} is not one that can be checked: {error}"
        return
    for problem in sorted({problem for tensor in references.tensors for problem in _location_problems(tensor, files)}):
        yield f"graph {name} {problem}"
    for domain, operator in sorted(references.operators):
        if domain not in _DOMAINS:
            yield f"graph {name} needs operator {operator!r} of {domain!r}; libraries of operators are never loaded"


def _location_problems(tensor: ExternalTensor, files: dict[str, FileDigest]) -> Iterator[str]:
    """Why a tensor must not be read from where it says it is; names must be literally those of the manifest."""
    expected = files.get(tensor.location)
    if expected is None:
        yield f"has a tensor in {tensor.location!r}, which is not a file that the manifest lists"
    elif tensor.offset + (tensor.length or 0) > expected.size:
        yield f"has a tensor in {tensor.location} that ends after the file's {expected.size} bytes"


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
