"""Checkpointing and offloading: exact around every strategy, with their price in the plans."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from harness.check.cell import check
from harness.check.run import check_group
from harness.errors import MisfitError, MissedPairError, OverwriteError, UnsupportedError
from harness.explain.volumes import host_bytes, received_bytes
from harness.memory.ledger import ledger
from harness.plan.dependencies import linked
from harness.plan.plan import Plan, to_json
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.reader import from_json
from harness.plan.sizes import linear_flops, piece_bytes, tile_flops
from harness.plan.tasks import Free, Linear, LinearOp, Memory, Tensor, Tile
from harness.planning.checkpoint import Checkpoint
from harness.records.config import Where
from harness.sweep.simulate_cells import simulate_cell
from harness.verify.pair import check_pair
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import DIRECT, strategy
from tests.support import layer_config, layer_problem

every_strategy = pytest.mark.parametrize("name", DIRECT)
KEEPING = (
    "checkpoint=layer",
    "checkpoint=attention",
    "offload=true",
    "checkpoint=layer,offload=true",
    "checkpoint=attention,offload=true",
)
WEIGHTS = (Tensor.W_Q, Tensor.W_K, Tensor.W_V, Tensor.W_O)
layer = partial(layer_problem, dtype=Dtype.BFLOAT16)


def both(text: str, problem: Problem) -> tuple[Plan, Plan]:
    forward, backward = (strategy(text).plan(problem, direction) for direction in Direction)
    return forward, backward


def million(cp: int = 8) -> Problem:
    """A layer of an 8B model and 1M tokens."""
    return Problem(
        pattern=make_pattern("causal", 2**20),
        heads_q=32,
        heads_kv=8,
        head_dim=128,
        dtype=Dtype.BFLOAT16,
        cp=cp,
        hidden=4096,
        rotary=5e5,
    )


def tiles(plan: Plan, direction: Direction) -> list[tuple[object, ...]]:
    return [
        (task.place, task.reads, task.writes)
        for task in plan.tasks
        if isinstance(task, Tile) and task.direction is direction
    ]


# Exact ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeping", KEEPING)
@every_strategy
def test_a_layer_that_keeps_less_equals_the_dense_one(name: str, keeping: str) -> None:
    """All results in float64, the bytes that moved, and what device and host held."""
    for cell in check(layer_config(f"{name}:{keeping}")):
        assert (cell.status, cell.reason) == ("passed", "")


@pytest.mark.parametrize(
    ("text", "pattern", "cp"),
    [
        ("upipe:ring=2,checkpoint=layer", "causal", 4),
        ("upipe:ring=2,resend=true,checkpoint=layer,offload=true", "full", 4),
        ("upipe:save_gathered=true,checkpoint=attention", "causal", 2),
        ("upipe:in_order=true,stage_heads=4,short_last=true,checkpoint=layer", "causal", 2),
        ("fpdt:parts=3,checkpoint=layer,offload=true", "documents:lengths=10+1+26", 3),
        ("zigzag:checkpoint=layer,offload=true", "documents:lengths=10+1+26", 7),
        ("allgather:checkpoint=attention", "star", 3),
        ("grid:fused=true,checkpoint=layer", "causal", 4),
        ("usp:2x2,checkpoint=layer,offload=true", "causal", 4),
    ],
)
def test_options_of_strategies_and_other_patterns_are_exact_too(
    text: str, pattern: str, cp: int
) -> None:
    for cell in check(layer_config(text, pattern, cp)):
        assert (cell.status, cell.reason) == ("passed", "")


def test_processes_give_the_bits_of_the_local_run() -> None:
    texts = ("zigzag:checkpoint=layer,offload=true", "upipe:checkpoint=layer", "fpdt:offload=true")
    cells = [replace(layer_config(text), dtype=Dtype.FLOAT32) for text in texts]
    for cell in (cell for pair in check_group(cells, jobs=1) for cell in pair):
        assert (cell.status, cell.reason, cell.config.transport) == ("passed", "", "gloo")


@pytest.mark.parametrize("keeping", KEEPING)
@every_strategy
def test_plans_that_keep_less_join_and_come_back_from_json(name: str, keeping: str) -> None:
    forward, backward = both(f"{name}:{keeping}", layer())
    check_pair(forward, backward)
    for plan in (forward, backward):
        assert from_json(to_json(plan)) == plan
        assert plan.strategy == f"{name}:{keeping}"


# What is kept, and where ------------------------------------------------------------------------


@every_strategy
def test_forward_saves_what_it_says_where_it_says(name: str) -> None:
    for checkpoint, tensors in (
        ("layer", {Tensor.X}),
        ("attention", {Tensor.X, Tensor.OUT, Tensor.LSE}),
    ):
        for offload in ("false", "true"):
            forward, backward = both(f"{name}:checkpoint={checkpoint},offload={offload}", layer())
            assert {piece.tensor for _, piece in forward.saved} == tensors
            started = {r.piece.tensor for r in backward.initial if r.piece.tensor not in WEIGHTS}
            assert started == tensors | {Tensor.DY}
            if offload == "true":
                assert {place.memory for place, _ in forward.saved} == {Memory.HOST}
                held = {r.piece.tensor for r in backward.initial if r.place.memory != Memory.HOST}
                assert held == {*WEIGHTS, Tensor.DY}


@every_strategy
def test_backward_attends_again_what_it_must_and_nothing_else(name: str) -> None:
    """A whole checkpoint all tiles of the forward plan, one of attention none."""
    forward, _ = both(name, layer())
    _, whole = both(f"{name}:checkpoint=layer", layer())
    _, attention = both(f"{name}:checkpoint=attention", layer())
    _, plain = both(name, layer())
    assert tiles(whole, Direction.FORWARD) == tiles(forward, Direction.FORWARD)
    assert tiles(attention, Direction.FORWARD) == []
    for plan in (whole, attention):
        assert tiles(plan, Direction.BACKWARD) == tiles(plain, Direction.BACKWARD)
        assert not any(isinstance(t, Linear) and t.op is LinearOp.OUTPUT for t in plan.tasks)


def moved(text: str) -> tuple[float, float]:
    """GiB that a rank sends of an 8B layer with 1M tokens, forward and backward."""
    sizes = [set(received_bytes(plan)) for plan in both(text, million())]
    assert [len(size) for size in sizes] == [1, 1]
    return sizes[0].pop() / 2**30, sizes[1].pop() / 2**30


def test_a_checkpoint_costs_one_more_forward() -> None:
    """By the published code: with checkpoints 6 H + 6 E against 8 H + 8 E heads, 4/3 x."""
    assert moved("ulysses:checkpoint=layer") == (2.1875, 2 * 2.1875)
    assert moved("upipe:checkpoint=layer") == (2.1875, 3 * 2.1875)
    ulysses, upipe = (sum(moved(f"{name}:checkpoint=layer")) for name in ("ulysses", "upipe"))
    assert 3 * upipe == 4 * ulysses


@pytest.mark.parametrize(("name", "times"), [("ulysses", 2), ("upipe", 3)])
def test_queries_and_keys_are_projected_as_often_as_published(name: str, times: int) -> None:
    """By the published code, UPipe projects a third time in its own backward."""

    def flops(plans: tuple[Plan, Plan]) -> int:
        return sum(
            linear_flops(plan, task)
            for plan in plans
            for task in plan.tasks
            if isinstance(task, Linear) and task.op is LinearOp.PROJECT
        )

    once = flops((both("ulysses", million())[0],))
    assert flops(both(f"{name}:checkpoint=layer", million())) == times * once


@pytest.mark.parametrize("checkpoint", Checkpoint)
@pytest.mark.parametrize("name", ["zigzag", "ulysses", "upipe"])
def test_the_host_holds_what_is_saved_and_all_of_it_comes_and_goes_once(
    name: str, checkpoint: Checkpoint
) -> None:
    text = f"{name}:checkpoint={checkpoint.value},offload=true"
    forward, backward = both(text, layer("full", 40))
    saved = [0, 0]
    for place, piece in forward.saved:
        saved[place.rank] += piece_bytes(forward, piece)
    books = [ledger(verify(plan)) for plan in (forward, backward)]
    assert [list(book.host_peak_bytes) for book in books] == [saved, saved]
    assert list(host_bytes(forward)) == list(host_bytes(backward)) == saved


def test_an_8b_layer_offloads_one_hidden_state_each_way() -> None:
    """Of A bytes: A to the host forward and A back."""
    plans = both("upipe:checkpoint=layer,offload=true", million())
    a = 2**20 // 8 * 4096 * 2
    assert [set(host_bytes(plan)) for plan in plans] == [{a}, {a}]


@pytest.mark.parametrize("name", ["ring", "zigzag", "ulysses", "usp", "upipe", "allgather"])
def test_backward_starts_from_less_and_peaks_are_what_the_tasks_make_them(name: str) -> None:
    problem = layer("causal", 960, cp=2)
    inputs, peaks = {}, {}
    for keeping in ("none", "attention", "layer"):
        for offload in ("false", "true"):
            text = f"{name}:checkpoint={keeping},offload={offload}"
            book = ledger(verify(both(text, problem)[1]))
            inputs[keeping, offload] = book.inputs_bytes[0]
            peaks[keeping, offload] = book.peak_bytes[0]
    assert inputs["layer", "false"] < inputs["attention", "false"] <= inputs["none", "false"]
    least = {inputs[keeping, "true"] for keeping in ("none", "attention", "layer")}
    assert least == {inputs["layer", "false"] - 480 * 11 * 3 * 2}  # x of a rank
    assert peaks["none", "true"] <= peaks["none", "false"]


# In the simulator -------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", ["h100-1x8", "h100-hamming"])
def test_what_is_done_again_takes_time_and_is_no_work(cluster: str) -> None:
    """Backward takes longer by about a forward; the flops that count stay those of backward."""

    def simulated(text: str, direction: Direction) -> tuple[float, float]:
        cell = replace(
            layer_config(text, "causal"),
            **{"seqlen_q": 2**17, "seqlen_kv": 2**17, "dtype": Dtype.BFLOAT16, "hidden": 48},
            direction=direction,
            transport=Where.SIMULATED,
            cluster=cluster,
        )
        record = simulate_cell(cell, {})
        assert record.status == "ok", record.reason
        time, rate = record.time_s, record.tflops_per_gpu
        assert isinstance(time, float)
        assert isinstance(rate, float)
        return time, time * rate

    forward, _ = simulated("ulysses", Direction.FORWARD)
    plain, work = simulated("ulysses", Direction.BACKWARD)
    again, same = simulated("ulysses:checkpoint=layer", Direction.BACKWARD)
    assert same == pytest.approx(work)
    assert again == pytest.approx(plain + forward, rel=0.05)
    assert again > plain + 0.9 * forward


def test_the_flops_of_a_plan_are_those_of_its_tiles() -> None:
    _, whole = both("zigzag:checkpoint=layer", layer())
    again, own = (
        sum(
            tile_flops(whole, t)
            for t in whole.tasks
            if isinstance(t, Tile) and t.direction is direction
        )
        for direction in Direction
    )
    assert 2 < own / again < 3


# What is caught ---------------------------------------------------------------------------------


def without(plan: Plan, *gone: int) -> Plan:
    tasks = [task for index, task in enumerate(plan.tasks) if index not in gone]
    return replace(plan, tasks=linked(plan.initial, tasks))


def find(plan: Plan, kind: type) -> Iterator[int]:
    return (index for index, task in enumerate(plan.tasks) if isinstance(task, kind))


def test_a_tile_that_is_not_done_again_is_missed() -> None:
    _, backward = both("zigzag:checkpoint=layer", layer())
    verify(backward)
    with pytest.raises(MissedPairError, match="out of chunk"):
        verify(without(backward, next(find(backward, Tile))))


def test_visitors_that_stay_are_in_the_way_of_those_that_come_again() -> None:
    _, backward = both("ring:checkpoint=layer", layer())
    with pytest.raises(OverwriteError, match="already there"):
        verify(without(backward, *find(backward, Free)))


def test_attention_alone_attends_nothing_again() -> None:
    problem = replace(layer(), hidden=None, rotary=None)
    forward, backward = both("ring", problem)
    tile = forward.tasks[next(find(forward, Tile))]
    wrong = replace(backward, tasks=linked(backward.initial, (tile, *backward.tasks)))
    with pytest.raises(MisfitError, match="what its kernel does"):
        verify(wrong)


@every_strategy
def test_attention_alone_is_refused(name: str) -> None:
    problem = replace(layer(), hidden=None, rotary=None)
    for keeping in KEEPING:
        with pytest.raises(UnsupportedError, match="only apply to whole layers") as caught:
            strategy(f"{name}:{keeping}").plan(problem, Direction.FORWARD)
        assert caught.value.nearest == ("--scope layer",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ring:checkpoint=all", "must be one of none, attention, layer"),
        ("ring:offload=1", "must be true or false"),
        ("ring:keep=true", "as all do round_sent=, align=, checkpoint=, offload=, sum_gradients="),
    ],
)
def test_a_wrong_option_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        strategy(text)
