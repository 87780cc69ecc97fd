"""Step times: the published table, its shape in the context, and what was not fitted."""

from statistics import median

import pytest

from harness.cluster.machine import Cluster
from harness.cluster.presets import cluster
from harness.plan.problem import Direction
from harness.training.footprint import on_cluster
from harness.training.models import Model
from harness.training.named_models import model
from harness.training.stack import Column, Stack, as_run
from harness.training.step_time import layer_time, step_time
from strategies import strategy

K, M = 2**10, 2**20
LLAMA, QWEN = model("llama3-8b"), model("qwen3-32b")
NODE, PAIR = cluster("h100-1x8"), cluster("h100-2x8")

# tokens/s/GPU of 8B on 8 x H100 by length; arXiv:2602.21196, table 3, as on the project page
PUBLISHED = {
    "zigzag": {128 * K: 2064.90, 512 * K: 841.05, M: 458.51, 3 * M: 159.96},
    "ulysses": {128 * K: 2320.47, 512 * K: 878.63, M: 475.33, 3 * M: 162.41},
    "fpdt": {128 * K: 1171.68, 512 * K: 621.20, M: 382.42, 4 * M: 119.76},
    "upipe": {128 * K: 2281.05, 512 * K: 867.17, M: 472.53, 5 * M: 98.25},
}


def tokens_per_s(shape: Model, name: str, machine: Cluster, seqlen: int) -> float:
    return (
        seqlen / machine.gpus / step_time(shape, on_cluster(name, machine), machine, seqlen).seconds
    )


def test_the_step_times_of_the_8b_table_are_met() -> None:
    """Median at most 5 %, worst at most 12 %: every strategy, shortest and longest."""
    errors = [
        abs(published / tokens_per_s(LLAMA, name, NODE, seqlen) - 1)
        for name, row in PUBLISHED.items()
        for seqlen, published in row.items()
    ]
    assert median(errors) <= 0.05
    assert max(errors) <= 0.12


@pytest.mark.parametrize(
    ("shape", "seqlen", "ratio"),
    [
        # throughput of UPipe over USP on 16 x H100, to which nothing was fitted:
        (LLAMA, 512 * K, 0.955),  # arXiv:2602.21196, project page, read off
        (LLAMA, 4 * M, 0.993),  # as above
        (QWEN, 512 * K, 1 - 0.058),  # arXiv:2602.21196, table 3, 32B
        (QWEN, M, 1 - 0.032),  # as above
    ],
)
def test_over_two_nodes_upipe_falls_behind_as_far_as_published(
    shape: Model, seqlen: int, ratio: float
) -> None:
    upipe, usp = (tokens_per_s(shape, name, PAIR, seqlen) for name in ("upipe", "usp"))
    assert upipe / usp == pytest.approx(ratio, abs=0.02)


@pytest.mark.parametrize("name", ["ulysses", "upipe", "zigzag"])
def test_a_step_is_launch_and_a_line_and_a_square(name: str) -> None:
    one, two = (step_time(LLAMA, strategy(name), NODE, n * M) for n in (1, 2))
    assert one.seconds == pytest.approx(one.launch_s + one.linear_s + one.quadratic_s)
    assert two.quadratic_s == pytest.approx(4 * one.quadratic_s, rel=1e-4)
    assert two.linear_s == pytest.approx(2 * one.linear_s, rel=0.02)
    assert two.launch_s == pytest.approx(one.launch_s)


def test_attention_of_a_step_is_its_flops_at_the_rates_of_its_kernels() -> None:
    """Forward twice, for the checkpoint, and 2.5 of it backward; half a square, 8 GPUs."""
    flops = 2 * M**2 * 32 * 32 * 128 / 8
    gpu = as_run(NODE).gpu
    expected = 2 * flops / (gpu.flops_per_s * gpu.efficiency_forward)
    expected += 2.5 * flops / (gpu.flops_per_s * gpu.efficiency_backward)
    found = step_time(LLAMA, strategy("ulysses"), NODE, M).quadratic_s
    assert expected == pytest.approx(found, rel=1e-3)


def test_fpdt_of_many_parts_is_extended_from_few() -> None:
    """Nine parts planned, against nine extended from four, six and eight."""
    machine = as_run(NODE)
    seqlen = 9 * 65536
    for direction in Direction:
        long = layer_time(LLAMA, strategy("fpdt"), machine, seqlen, direction)
        planned = layer_time(LLAMA, strategy("fpdt:parts=9"), machine, seqlen, direction)
        for field in ("attention_s", "products_s", "light_s", "launch_s"):
            assert getattr(long, field) == pytest.approx(getattr(planned, field), rel=1e-3), field
        whole = planned.attention_s + planned.exposed_s
        assert long.exposed_s == pytest.approx(planned.exposed_s, abs=0.002 * whole)


def test_only_released_upipe_pays_for_what_it_sends_again() -> None:
    chosen = on_cluster("upipe", PAIR)
    released, own = (
        step_time(QWEN, chosen, PAIR, M, column=column)
        for column in (Column.RELEASED, Column.IMPLEMENTATION)
    )
    assert released.seconds > 1.02 * own.seconds


def test_rings_over_nodes_take_the_sum_of_kernels_and_transfers() -> None:
    """Keys and values of 8 KV heads cross to the other node once: nothing hides them."""
    machine = as_run(PAIR)
    time = layer_time(LLAMA, strategy("usp:8x2"), machine, M, Direction.FORWARD)
    crossing = M / 16 * 8 * 2 * 128 * 2 / machine.nic.bandwidth_bytes_per_s
    assert crossing < time.exposed_s < 1.5 * crossing


@pytest.mark.parametrize(
    ("stack", "products"),
    [
        (Stack(), 5),  # forward, again for the checkpoint, again in tiles, two backward
        (Stack(tiled=False), 4),
        (Stack(tiled=False, checkpoint=False), 3),
    ],
)
def test_the_mlp_is_as_many_products_as_the_stack_asks_for(stack: Stack, products: int) -> None:
    gpu = as_run(NODE).gpu
    tokens, weights = M / 8, 3 * 4096 * 14336
    one = 32 * 2 * tokens * weights / (gpu.flops_per_s * gpu.efficiency_linear)
    found = step_time(LLAMA, strategy("ulysses"), NODE, M, stack=stack).terms["mlp"]
    assert products * one == pytest.approx(found)


def test_clusters_that_no_published_run_had_keep_their_own_rates_and_say_so() -> None:
    a800 = cluster("a800")
    own = as_run(a800)
    assert own.gpu == a800.gpu
    assert "own rates" in own.calibration
    assert as_run(NODE).gpu != NODE.gpu
    assert "fitted to its 8B table" in as_run(NODE).calibration


def test_what_is_not_recomputed_or_offloaded_costs_nothing() -> None:
    base = step_time(LLAMA, strategy("ulysses"), NODE, M)
    plain = step_time(LLAMA, strategy("ulysses"), NODE, M, stack=Stack(checkpoint=False))
    assert plain.terms["offload"] == 0
    gpu = as_run(NODE).gpu
    forward = 2 * M**2 * 32 * 32 * 128 / 8 / (gpu.flops_per_s * gpu.efficiency_forward)
    assert base.quadratic_s - plain.quadratic_s == pytest.approx(forward, rel=1e-3)
