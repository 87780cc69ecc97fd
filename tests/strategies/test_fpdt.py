"""FPDT: exact for every pattern, Ulysses on the network, and on the host what it says it is."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from harness.check.cell import check
from harness.errors import UnsupportedError
from harness.explain.volumes import received_bytes
from harness.memory.ledger import ledger
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.sizes import piece_bytes
from harness.plan.tasks import Memory, Tensor, Tile, Transfer
from harness.records.config import Config, Where
from harness.sweep.simulate_cells import simulate_cell
from harness.verify.pair import check_pair
from harness.verify.proof import verify
from strategies import strategy
from tests.support import layer_config, layer_problem

layer = partial(layer_problem, seqlen=96, dtype=Dtype.BFLOAT16)


def plans(problem: Problem, text: str) -> tuple[Plan, Plan]:
    forward, backward = (strategy(text).plan(problem, direction) for direction in Direction)
    return forward, backward


def config(text: str, pattern: str, cp: int, **other: object) -> Config:
    return replace(layer_config(text, pattern, cp, head_dim=4), **other)


@pytest.mark.parametrize(
    ("text", "pattern", "cp", "seqlen"),
    [
        ("fpdt", "causal", 2, 37),
        ("fpdt:parts=3", "causal", 4, 37),
        ("fpdt:parts=3", "full", 2, 37),
        ("fpdt:parts=4", "window:left=7,right=3", 2, 37),
        ("fpdt:parts=3", "documents:lengths=10+1+26", 2, 37),
        ("fpdt:parts=3", "star", 2, 41),
        ("fpdt:parts=1", "causal", 3, 37),
        ("fpdt:parts=3", "causal", 4, 1),
    ],
)
def test_fpdt_equals_the_dense_layer(text: str, pattern: str, cp: int, seqlen: int) -> None:
    """All results, the bytes between ranks, and what device and host held."""
    cells = check(config(text, pattern, cp, seqlen_q=seqlen, seqlen_kv=seqlen))
    assert [cell.reason for cell in cells] == [""] * 2


@pytest.mark.parametrize("text", ["fpdt:parts=3", "upipe", "upipe:ring=2", "zigzag", "ulysses"])
def test_tokens_that_attend_or_are_attended_by_nobody_have_zero_results(
    tmp_path: Path, text: str
) -> None:
    """The first third attends nothing and the last third is not attended."""
    path = tmp_path / "table.txt"
    path.write_text("000\n110\n110\n")
    for cell in check(config(text, f"table:file={path}", 2)):
        assert (cell.status, cell.reason) == ("passed", "")


def test_fpdt_is_as_exact_in_bfloat16_as_it_may_be() -> None:
    cells = check(config("fpdt:parts=3", "causal", 2, dtype=Dtype.BFLOAT16, rotary=None))
    assert [cell.reason for cell in cells] == [""] * 2


def host_bytes(plan: Plan, towards: Memory, *tensors: Tensor) -> int:
    """Bytes that all ranks move to one memory from the other."""
    return sum(
        piece_bytes(plan, piece)
        for task in plan.tasks
        if isinstance(task, Transfer) and task.leg.dst.memory is towards
        for piece in task.leg.pieces
        if task.leg.src.memory is not towards and piece.tensor in tensors
    )


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_a_causal_forward_fetches_the_keys_of_all_earlier_parts(parts: int) -> None:
    """n (n - 1) / 2 parts of keys come from the host; each part goes there once."""
    forward, _ = plans(layer(), f"fpdt:parts={parts}")
    every = host_bytes(forward, Memory.HOST, Tensor.K, Tensor.V)
    fetched = host_bytes(forward, Memory.DEVICE, Tensor.K, Tensor.V)
    assert every * (parts - 1) // 2 == fetched
    assert every == layer().batch * 96 * 2 * (8 + 5) * 2  # tokens, KV heads, widths, bfloat16


@pytest.mark.parametrize("pattern", ["causal", "full"])
def test_ranks_exchange_what_ulysses_exchanges(pattern: str) -> None:
    problem = layer(pattern)
    for ours, theirs in zip(plans(problem, "fpdt:parts=3"), plans(problem, "ulysses"), strict=True):
        assert received_bytes(theirs) == received_bytes(ours)


def held_parts(plan: Plan, tensor: Tensor) -> int:
    """The most chunks of a tensor that a device holds gathered when a tile begins."""
    program = verify(plan)
    held: set[int] = set()
    most = 0
    for task, step in zip(plan.tasks, program.steps, strict=True):
        held.update(step.creates)
        if isinstance(task, Tile):
            here = [program.slabs[s] for s in held if program.slabs[s].place == task.place]
            count = sum(len(x.piece.chunks) for x in here if x.piece.tensor is tensor)
            most = max(most, count)
        held.difference_update(step.frees)
    return most


@pytest.mark.parametrize("pattern", ["causal", "full"])
def test_a_device_holds_two_parts_of_keys_however_many_there_are(pattern: str) -> None:
    """The one that is attended and the one that comes next; backward the same of rows."""
    for parts in (3, 5):
        forward, backward = plans(layer(pattern), f"fpdt:parts={parts}")
        assert held_parts(forward, Tensor.K) == 2 * 2
        assert held_parts(backward, Tensor.DOUT) == 2 * 2
        assert held_parts(backward, Tensor.K) == 2


def test_more_parts_take_less_of_the_device_and_rest_on_the_host() -> None:
    problem = layer(seqlen=960)
    books = [ledger(verify(plans(problem, f"fpdt:parts={n}")[0])) for n in (1, 4, 16)]
    peaks = [book.peak_bytes[0] for book in books]
    assert sorted(peaks, reverse=True) == peaks
    assert peaks[2] < peaks[0] / 2
    hosts = {book.host_peak_bytes for book in books}
    assert len(hosts) == 1
    assert max(ledger(verify(plans(problem, "ulysses")[0])).host_peak_bytes) == 0


def test_backward_starts_from_the_host() -> None:
    forward, backward = plans(layer("window:left=20,right=0"), "fpdt:parts=4")
    check_pair(forward, backward)
    places = {place.memory for place, piece in forward.saved if piece.tensor is not Tensor.X}
    assert {Memory.HOST} == places


def test_fpdt_says_why_it_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="whole layers"):
        strategy("fpdt").plan(replace(layer(), hidden=None, rotary=None), Direction.FORWARD)
    with pytest.raises(UnsupportedError, match=r"cp \(7\) must not exceed heads_q \(6\)"):
        strategy("fpdt").plan(layer(cp=7), Direction.FORWARD)


def test_what_goes_to_the_host_is_not_counted_as_sent() -> None:
    """A simulated cell says what Ulysses says."""
    cells = [
        replace(
            config(text, "causal", 2, dtype=Dtype.BFLOAT16),
            transport=Where.SIMULATED,
            cluster="h100-1x8",
        )
        for text in ("fpdt:parts=3", "ulysses")
    ]
    found = [simulate_cell(cell, {}) for cell in cells]
    assert [entry.status for entry in found] == ["ok", "ok"]
    assert found[0].bytes_sent_per_rank == found[1].bytes_sent_per_rank
