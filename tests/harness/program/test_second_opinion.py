"""torch's CUDA sanitizer, fed the same programs, tells the same races as the proof of bytes."""

import logging
from collections.abc import Iterator
from random import Random

import pytest
from torch.cuda._sanitizer import EventHandler

from harness.errors import DeviceProgramError
from harness.plan.problem import Dtype
from harness.prepare.verified_plans import planned
from harness.program.check_bytes import byte_runs, check_bytes, touched_views
from harness.program.emit import emit
from harness.program.mutations import MUTATIONS
from harness.program.operations import Lane, RankProgram, Record, Wait
from tests.support import problem


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """It logs an error for each buffer whose making it did not see."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def sanitized(program: RankProgram) -> int:
    """Feed the sanitizer; count what it tells. A tensor there is a stretch of bytes here."""
    handler, lanes = EventHandler(), {lane: at for at, lane in enumerate(Lane)}
    for lane in tuple(lanes.values())[1:]:
        handler._handle_stream_creation(lane)
    touched = [touched_views(operation) for operation in program.operations]
    edges = sorted(
        {e for views in touched for view, _ in views for r in byte_runs(view) for e in r}
    )
    for edge in edges:
        handler._handle_memory_allocation(edge + 1)
    told = 0
    for operation, views in zip(program.operations, touched, strict=True):
        lane = lanes[operation.lane]
        match operation:
            case Record(event=event):
                handler._handle_event_creation(event + 1)
                handler._handle_event_record(event + 1, lane)
            case Wait(event=event):
                handler._handle_event_wait(event + 1, lane)
            case _:
                cells: dict[bool, set[int]] = {True: set(), False: set()}
                for view, writes in views:
                    for first, end in byte_runs(view):
                        cells[writes].update(e + 1 for e in edges if first <= e < end)
                read, written = cells[False] - cells[True], cells[True]
                names = {each: ["bytes"] for each in read | written}
                told += len(
                    handler._handle_kernel_launch(lane, read, written, set(), "launch", names)
                )
    return told


@pytest.mark.parametrize("text", ["zigzag", "ulysses", "grid:rows=2"])
def test_the_sanitizer_finds_the_same_races(text: str) -> None:
    p = problem("causal", 23, (8, 4), dims=(6, 4), dtype=Dtype.BFLOAT16, cp=4)
    program, draw = emit(planned(p, text).forward, gpus_per_node=3), Random(text)
    assert sum(map(sanitized, program.ranks)) == 0
    for kind in ("a wait dropped", "a wait dropped", "a lifetime shortened", "ranges aliased"):
        mutant = MUTATIONS[kind](program, draw)
        assert mutant is not None
        (broken,) = (
            one for one, was in zip(mutant.ranks, program.ranks, strict=True) if one != was
        )
        wrong = ""
        try:
            check_bytes(broken)
        except DeviceProgramError as error:
            wrong = str(error)
        # One that overlaps itself is refused before its races are looked for.
        assert sanitized(broken) > 0 or "is ordered" not in wrong
        assert wrong or sanitized(broken) == 0
