"""What must hold of a scheduler between steps, as pure checks that return every violation."""

from __future__ import annotations

from collections.abc import Iterator

from dragoman_server.engine.request import Priority, Sequence, SequenceStatus
from dragoman_server.engine.scheduler import Scheduler
from dragoman_server.engine.waiting_line import WaitingLine, cost


def violations(scheduler: Scheduler) -> Iterator[str]:
    """Describe everything that is wrong; nothing if all is well."""
    rows, limits = scheduler.table.rows, scheduler.limits
    yield from _line_violations(scheduler.line)
    if scheduler.num_reserved > limits.max_rows:
        yield f"{scheduler.num_reserved} rows are reserved of {limits.max_rows}"
    if scheduler.num_reserved != sum(s.max_rows for s in scheduler.running.values()):
        yield f"{scheduler.num_reserved} rows are reserved, which is not what running sequences may need"
    for slot, row in enumerate(rows):
        if row.slot != slot:
            yield f"a row of sequence {row.sequence.sequence_id} in slot {slot} believes it is in {row.slot}"
        is_interactive = row.sequence.priority is Priority.INTERACTIVE
        if is_interactive != (slot < scheduler.table.num_interactive):
            yield f"slot {slot} is on the wrong side of the border between interactive and bulk rows"
    held = sorted(id(row) for sequence in scheduler.running.values() for row in sequence.rows)
    if held != sorted(id(row) for row in rows):
        yield "the rows in slots are not the rows of the running sequences"
    for sequence in scheduler.running.values():
        yield from _sequence_violations(sequence)


def _line_violations(line: WaitingLine) -> Iterator[str]:
    # Preempted sequences come back uninvited and do not count against the bounds.
    new = [sequence for sequence in line if not sequence.times.scheduled]
    for priority in Priority:
        of_priority = [sequence for sequence in new if sequence.priority is priority]
        if len(of_priority) > line.max_waiting:
            yield f"{len(of_priority)} sequences wait where {line.max_waiting} may"
        if (num_tokens := sum(map(cost, of_priority))) > line.max_tokens:
            yield f"{num_tokens} tokens wait where {line.max_tokens} may"


def _sequence_violations(sequence: Sequence) -> Iterator[str]:
    name = f"sequence {sequence.sequence_id}"
    if sequence.status is not SequenceStatus.RUNNING:
        yield f"{name} holds rows while it is {sequence.status.value}"
    if not 1 <= len(sequence.rows) <= sequence.max_rows:
        yield f"{name} has {len(sequence.rows)} rows, between 1 and {sequence.max_rows} are allowed"
    for row in sequence.rows:
        if len(row.ids) >= max(sequence.options.max_target_tokens, 1):
            yield f"{name} is longer than it may be"
