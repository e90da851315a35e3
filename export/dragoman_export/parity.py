"""Proof that exported graphs compute what the PyTorch model computes.

Checked in this order, so that the first failure names the simplest cause: names, axes, numbers, then tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnxruntime

from dragoman_bundle import tensors
from dragoman_bundle.manifest import ParityReport, Precision, TensorDescription
from dragoman_export.batching import Ids
from dragoman_export.decoding import LengthLimit, Logits, StepModel, greedy_search
from dragoman_export.errors import ParityError
from dragoman_export.onnx_steps import OnnxStepModel
from dragoman_export.tokenization import START_ID

BATCH_SIZES = (1, 5, 32)
"""Greedy tokens must not depend on which of these decodes them."""
_ALONE = 60
"""Sentences decoded one by one as well; all of them would take longest and show nothing more."""


class Requirement(NamedTuple):
    """What a variant must reach."""

    max_logit_difference: float
    """Largest absolute difference; infinity where rounding makes it meaningless."""
    top1_agreement: float
    """Share of positions with the same most probable token, on the reference's own outputs."""
    identical: float
    """Share of sentences with the same greedy tokens."""

    def __str__(self) -> str:
        return (
            f"max abs logit difference <= {self.max_logit_difference:g}, top-1 agreement >= {self.top1_agreement:g}, "
            f"identical greedy sentences >= {self.identical:.0%}, and the same tokens at batch sizes "
            f"{BATCH_SIZES} (at 1 for the first {_ALONE} sentences)"
        )


REQUIREMENTS: dict[Precision, Requirement] = {
    "fp32": Requirement(1e-4, 1.0, 1.0),
    # Quality, not equality, is what int8 and fp16 are judged by; these bounds catch a wrong graph or scale.
    "int8": Requirement(float("inf"), 0.95, 0.5),
    "fp16": Requirement(0.25, 0.99, 0.9),
}


def check_interface(model: OnnxStepModel, expected: Mapping[str, Sequence[TensorDescription]]) -> None:
    """Compare names, element types and axes of all graphs with the manifest.

    Raises:
        ParityError: listing every difference.
    """
    problems = [
        problem
        for graph, session in _sessions(model)
        for problem in _interface_problems(graph, session, expected[f"{graph}_inputs"], expected[f"{graph}_outputs"])
    ]
    if problems:
        raise ParityError("the graphs have other tensors than the manifest:\n" + "\n".join(f"- {p}" for p in problems))


def _sessions(model: OnnxStepModel) -> Iterator[tuple[str, onnxruntime.InferenceSession]]:
    yield from (("encoder", model.encoder), ("decoder", model.decoder), ("search", model.search))
    if model.rows is not None:
        yield "rows", model.rows


def check_rows(model: OnnxStepModel) -> None:
    """Copy random lines within each of a few tensors, in place as the server does.

    Raises:
        ParityError: something else is in them then.
    """
    if model.rows is None:
        return
    rng = np.random.default_rng(0)
    names = [output.name for output in model.rows.get_outputs()]
    dim, dtype = model.rows.get_outputs()[0].shape[1], model.rows.get_outputs()[0].type
    arrays = [rng.normal(size=(60, dim)).astype(np.float16 if "float16" in dtype else np.float32) for _ in names]
    sources, targets = rng.permutation(60)[:20], rng.permutation(60)[:20]
    expected = [array.copy() for array in arrays]
    binding = model.rows.io_binding()
    binding.bind_cpu_input(tensors.FROM_LINES, sources)
    binding.bind_cpu_input(tensors.TO_LINES, targets[:, None])
    for i, (array, copy) in enumerate(zip(arrays, expected, strict=True)):
        copy[targets] = copy[sources]
        place = ("cpu", 0, array.dtype, array.shape, array.ctypes.data)
        binding.bind_input(tensors.copy_source(i), *place)
        binding.bind_input(tensors.copy_target(i), *place)
        binding.bind_output(tensors.copy_target(i, "after"), *place)
    model.rows.run_with_iobinding(binding)
    if wrong := [i for i, (a, b) in enumerate(zip(arrays, expected, strict=True)) if not np.array_equal(a, b)]:
        raise ParityError(f"the rows graph does not copy the lines of tensors {wrong} as it should")


def _interface_problems(
    graph: str,
    session: onnxruntime.InferenceSession,
    inputs: Sequence[TensorDescription],
    outputs: Sequence[TensorDescription],
) -> Iterator[str]:
    element_types = {
        "float32": "tensor(float)",
        "float16": "tensor(float16)",
        "int8": "tensor(int8)",
        "int32": "tensor(int32)",
        "int64": "tensor(int64)",
    }
    for kind, found, expected in (
        ("input", session.get_inputs(), inputs),
        ("output", session.get_outputs(), outputs),
    ):
        have, want = {tensor.name: tensor for tensor in found}, {tensor.name: tensor for tensor in expected}
        for name in sorted(want.keys() - have.keys()):
            yield f"{graph}: {kind} {name} is missing"
        for name in sorted(have.keys() - want.keys()):
            yield f"{graph}: {kind} {name} is unexpected"
        for name in sorted(want.keys() & have.keys()):
            if have[name].type != element_types[want[name].dtype]:
                yield f"{graph}: {kind} {name} is {have[name].type}, not {want[name].dtype}"
            if tuple(have[name].shape) != want[name].axes:
                yield f"{graph}: {kind} {name} has axes {have[name].shape}, not {list(want[name].axes)}"


def compare(
    reference: StepModel,
    candidate: StepModel,
    sources: Sequence[Ids],
    precision: Precision,
    limit: LengthLimit,
    name: str,
) -> ParityReport:
    """Compare numbers, then tokens.

    Args:
        reference: the PyTorch model in fp32.
        candidate: the graphs.
        sources: token ids of real sentences.
        precision: of the graphs; decides what is required.
        limit: on greedy outputs.
        name: what the reference is, for the report.
    """
    requirement = REQUIREMENTS[precision]
    expected = _greedy(reference, sources, 32, limit)
    difference, agreement = _compare_numbers(reference, candidate, sources, expected)
    decoded = {size: _greedy(candidate, sources[: _ALONE if size == 1 else None], size, limit) for size in BATCH_SIZES}
    whole = decoded[BATCH_SIZES[-1]]
    invariant = all(tokens == whole[: len(tokens)] for tokens in decoded.values())
    num_identical = sum(a == b for a, b in zip(expected, whole, strict=True))
    passed = (
        difference <= requirement.max_logit_difference
        and agreement >= requirement.top1_agreement
        and num_identical >= requirement.identical * len(sources)
        and invariant
    )
    return ParityReport(
        reference=name,
        num_sentences=len(sources),
        num_identical=num_identical,
        max_abs_logit_difference=difference,
        top1_agreement=agreement,
        batch_invariant=invariant,
        batch_sizes=BATCH_SIZES,
        passed=passed,
        requirement=str(requirement),
    )


def _greedy(model: StepModel, sources: Sequence[Ids], batch_rows: int, limit: LengthLimit) -> list[list[int]]:
    # In the given order, not sorted by length: rows of one batch shall differ in length.
    outputs: list[list[int]] = []
    for start in range(0, len(sources), batch_rows):
        outputs += greedy_search(model, sources[start : start + batch_rows], limit)
    return outputs


def _compare_numbers(
    reference: StepModel, candidate: StepModel, sources: Sequence[Ids], targets: Sequence[Sequence[int]]
) -> tuple[float, float]:
    """Largest logit difference and top-1 agreement, over every position of `targets` and the one after."""
    largest, same, total = 0.0, 0, 0
    for start in range(0, len(sources), 16):
        rows = slice(start, start + 16)
        for a, b in zip(
            _forced_logits(reference, sources[rows], targets[rows]),
            _forced_logits(candidate, sources[rows], targets[rows]),
            strict=True,
        ):
            largest = max(largest, float(np.abs(a - b).max()))
            same += int((a.argmax(1) == b.argmax(1)).sum())
            total += len(a)
    return largest, same / max(total, 1)


def _forced_logits(model: StepModel, sources: Sequence[Ids], targets: Sequence[Sequence[int]]) -> Iterator[Logits]:
    """Per step, the logits [live rows, vocab_size] while the targets are fed in."""
    state = model.start(sources)
    lengths = np.array([len(target) for target in targets])
    last_ids = np.full(len(sources), START_ID, np.int64)
    for step in range(int(lengths.max()) + 1):
        logits, state = model.step(state, last_ids)
        yield logits[lengths >= step]
        last_ids = np.array([target[step] if step < len(target) else START_ID for target in targets], np.int64)
