"""What must hold of a scheduler between steps, as pure checks that return every violation."""

from __future__ import annotations

from collections.abc import Iterator

from dragoman_server.engine.request import SequenceStatus
from dragoman_server.engine.scheduler import Scheduler


def violations(scheduler: Scheduler) -> Iterator[str]:
    """Describe everything that is wrong; nothing if all is well."""
    running, limits = scheduler.running, scheduler.limits
    if len(running) > limits.max_rows:
        yield f"{len(running)} sequences run in {limits.max_rows} slots"
    if scheduler.num_waiting > limits.max_waiting:
        yield f"{scheduler.num_waiting} sequences wait where {limits.max_waiting} may"
    for slot, sequence in enumerate(running):
        if sequence.slot != slot:
            yield f"sequence {sequence.sequence_id} in slot {slot} believes it is in {sequence.slot}"
        if sequence.status is SequenceStatus.WAITING:
            yield f"sequence {sequence.sequence_id} holds slot {slot} while it waits"
        if len(sequence.output_ids) > sequence.options.max_target_tokens:
            yield f"sequence {sequence.sequence_id} is longer than it may be"
    if len({sequence.sequence_id for sequence in running}) < len(running):
        yield "a sequence holds two slots"
