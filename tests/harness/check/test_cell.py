"""Cells judged against the oracle, the plan and the ledger; one wrong thing makes a cell fail."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import strategies
from harness.check import run
from harness.check.cell import JudgedCell, RankRun, as_group, check, combine
from harness.check.run import check_all, check_group, dearest_first, hashes_of
from harness.execute.interpreter import _Interpreter as Interpreter
from harness.execute.transport import Handle, LocalTransport
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Dtype
from harness.plan.residency import Access, Program, Step
from harness.plan.tasks import Tile
from harness.proved import plans
from harness.records.check_record import Outcome
from harness.records.config import Config, Where
from harness.verify.proof import verify

CELL = Config(
    strategy="ring",
    pattern="causal",
    cp=3,
    seqlen_q=29,
    seqlen_kv=29,
    heads_q=6,
    heads_kv=2,
    head_dim=5,
    dtype=Dtype.FLOAT64,
)
EVERY = tuple(map(strategies.quick, strategies.STRATEGIES))


@pytest.fixture(autouse=True)
def _plan_afresh() -> None:
    plans._kept.cache_clear()


def outcomes(config: Config) -> tuple[Outcome, Outcome]:
    forward, backward = check(config)
    return forward.status, backward.status


def test_a_right_cell_passes_in_both_directions_and_keeps_its_errors() -> None:
    forward, backward = check(CELL)
    assert (forward.status, backward.status) == (Outcome.PASSED, Outcome.PASSED)
    assert (forward.reason, backward.reason) == ("", "")
    assert set(forward.max_rel_error) == {"out", "lse"}
    assert set(backward.max_rel_error) == {"out", "lse", "dq", "dk", "dv"}
    assert 0 < backward.max_rel_error["dk"] < 1e-12
    assert forward.config.direction is Direction.FORWARD
    assert forward.digest != backward.digest


def test_equal_cells_have_equal_bits_and_other_inputs_have_others() -> None:
    first, again, other = check(CELL)[0], check(CELL)[0], check(CELL, seeds=(7,))[0]
    assert first.digest == again.digest != other.digest


def test_what_a_strategy_cannot_do_is_refused_with_the_reason() -> None:
    for cell in check(replace(CELL, strategy="ulysses", heads_q=2, heads_kv=1)):
        assert cell.status is Outcome.REFUSED
        assert "heads" in cell.reason


@pytest.mark.parametrize("strategy", EVERY)
def test_a_tile_that_is_short_of_a_pair_fails_the_cell(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short_of_a_pair(plan: Plan) -> Program:
        tasks = list(plan.tasks)
        last = max(i for i, task in enumerate(tasks) if isinstance(task, Tile))
        tile = tasks[last]
        assert isinstance(tile, Tile)
        tasks[last] = replace(tile, area=tile.area - 1)
        return verify(replace(plan, tasks=tuple(tasks)))

    monkeypatch.setattr(plans, "verify", short_of_a_pair)
    forward, _ = check(replace(CELL, strategy=strategy))
    assert forward.status is Outcome.FAILED
    assert "area" in forward.reason
    assert "Error" not in forward.reason  # a rule of plans, in words


@pytest.mark.parametrize("strategy", EVERY)
def test_one_more_clone_makes_the_memory_differ(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Tensor] = []
    original = Interpreter._tile

    def clones(self: Interpreter, tile: Tile, step: Step) -> None:
        if tile.place.rank == 1:
            kept.append(self._read(step.accesses[0]).clone())
        original(self, tile, step)

    monkeypatch.setattr(Interpreter, "_tile", clones)
    forward, backward = check(replace(CELL, strategy=strategy))
    assert (forward.status, backward.status) == (Outcome.FAILED, Outcome.FAILED)
    assert "held" in forward.reason
    assert "the ledger says" in backward.reason


@pytest.mark.parametrize("strategy", EVERY)
def test_one_more_send_makes_the_bytes_differ(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LocalTransport.send

    def twice(self: LocalTransport, buffer: Tensor, src: int, dst: int, tag: int) -> Handle:
        if not self.traffic.messages:
            original(self, buffer, src, dst, 10**6)
        return original(self, buffer, src, dst, tag)

    monkeypatch.setattr(LocalTransport, "send", twice)
    forward, backward = check(replace(CELL, strategy=strategy))
    assert (forward.status, backward.status) == (Outcome.FAILED, Outcome.FAILED)
    assert "sent" in forward.reason
    assert "the plan says" in backward.reason


@pytest.mark.parametrize("dtype", [Dtype.FLOAT64, Dtype.FLOAT32, Dtype.BFLOAT16])
def test_a_result_that_is_slightly_off_fails(dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Interpreter._read
    factor = {Dtype.FLOAT64: 1 + 1e-9, Dtype.FLOAT32: 1 + 1e-4, Dtype.BFLOAT16: 1.1}[dtype]

    def scaled(self: Interpreter, access: Access) -> Tensor:
        value = original(self, access)
        return value * factor if access.piece.tensor == "v" else value

    monkeypatch.setattr(Interpreter, "_read", scaled)
    forward, _ = check(replace(CELL, dtype=dtype, head_dim=16))
    assert forward.status is Outcome.FAILED
    assert "out is off by" in forward.reason


def test_a_cell_that_raises_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(config: Config) -> tuple[JudgedCell, JudgedCell]:
        if config.cp == 3:
            raise RuntimeError("no such kernel")
        return check(config)

    monkeypatch.setattr(run, "check", raises)
    (bad, _), (good, _) = check_all([CELL, replace(CELL, cp=2)], jobs=1)
    assert (bad.status, good.status) == (Outcome.FAILED, Outcome.PASSED)
    assert "internal error, RuntimeError: no such kernel (test_cell.py:" in bad.reason


def test_processes_side_by_side_judge_as_one_does() -> None:
    cells = [replace(CELL, cp=cp, strategy=name) for name in ("ring", "zigzag") for cp in (2, 5)]
    alone = {pair[0].config: pair for pair in check_all(cells, jobs=1)}
    spread = {pair[0].config: pair for pair in check_all(cells, jobs=2)}
    assert alone == spread


def test_the_dearest_cells_come_first() -> None:
    cells = [CELL, replace(CELL, seqlen_q=97, seqlen_kv=97), replace(CELL, head_dim=64)]
    assert dearest_first(cells) == [cells[1], cells[2], cells[0]]


# Real processes -----------------------------------------------------------------------------


def rank_runs(
    cell: JudgedCell, wrong: Mapping[int, tuple[str, ...]] | None = None
) -> list[RankRun]:
    return [RankRun({rank: f"{rank}{cell.reason}"}, (wrong or {}).get(rank, ())) for rank in (0, 1)]


def test_other_bits_bytes_or_memory_in_processes_fail_the_cell() -> None:
    digest = combine({0: "0", 1: "1"})
    cell = JudgedCell(CELL, Outcome.PASSED, digest=digest)
    same = as_group(cell, rank_runs(cell))
    assert (same.status, same.config.transport) == (Outcome.PASSED, Where.GLOO)
    bits = as_group(replace(cell, digest="x"), rank_runs(cell))
    assert (bits.status, "different bits" in bits.reason) == (Outcome.FAILED, True)
    held = as_group(cell, rank_runs(cell, {1: ("held more",)}))
    assert (held.status, held.reason) == (Outcome.FAILED, "rank 1: held more")
    refused = as_group(replace(cell, status=Outcome.REFUSED, reason="no"))
    assert (refused.status, refused.reason) == (Outcome.REFUSED, "no")


def test_a_record_is_found_again_by_direction_and_transport() -> None:
    forward, backward = check(CELL)
    assert hashes_of(CELL, Where.LOCAL) == (forward.config.hash, backward.config.hash)
    assert hashes_of(CELL, Where.GLOO) == (
        as_group(forward).config.hash,
        as_group(backward).config.hash,
    )


NAMED = {
    f"{strategy}-{dtype.value}": replace(
        CELL,
        strategy=strategy,
        dtype=dtype,
        pattern=pattern,
        cp=2,
        seqlen_q=seqlen,
        seqlen_kv=seqlen,
        head_dim=16,
        batch=2,
    )
    for number, strategy in enumerate(
        [*EVERY, "usp:ring_inside=true", "allgather:placement=zigzag"][:10]
    )
    for dtype, pattern, seqlen in zip(
        (Dtype.FLOAT64, Dtype.FLOAT32, Dtype.BFLOAT16),
        [["causal", "star", "streaming", "strided", "full"][(number + k) % 5] for k in range(3)],
        (61, 97, 130),
        strict=True,
    )
}
"""30 cells that span strategies, patterns and precisions."""


def repeated(cells: list[Config], repeat: int) -> list[str]:
    pairs = check_group(cells, jobs=1, repeat=repeat)
    return [
        f"{cell.config.strategy} {cell.config.dtype}: {cell.reason}"
        for pair in pairs
        for cell in pair
        if cell.status is not Outcome.PASSED
    ]


def test_processes_give_the_same_bits_bytes_and_memory_as_one_process() -> None:
    assert len(NAMED) == 30
    assert repeated(list(NAMED.values())[::4], repeat=2) == []


@pytest.mark.slow
def test_thirty_cells_give_the_same_bits_twenty_times() -> None:
    assert repeated(list(NAMED.values()), repeat=20) == []


# Large degrees ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("strategy", EVERY)
def test_64_ranks_in_one_process_are_right(strategy: str) -> None:
    torch.set_num_threads(1)
    large = Config(
        strategy=strategy,
        pattern="causal",
        cp=64,
        seqlen_q=1024,
        seqlen_kv=1024,
        heads_q=64,
        heads_kv=8,
        head_dim=8,
    )
    assert outcomes(large) == (Outcome.PASSED, Outcome.PASSED)
