"""The simulator against hand computation, bounds, monotony, ties and published facts."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cluster.machine import Cluster, Link, Runtime
from harness.cluster.presets import cluster, h100
from harness.errors import UnsupportedError
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.residency import Program
from harness.plan.tasks import Collective
from harness.planning.strategy import Context
from harness.simulate.bounds import bounds
from harness.simulate.queues import Stream
from harness.simulate.simulator import simulate
from harness.simulate.streams import Dispatch
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import strategy

NS = 1e-9
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def toy(*, nvlink: float = 1e11, nic: float = 1e10, width: int = 8, nodes: int = 8) -> Cluster:
    """Round numbers: 1 TFLOP/s, 1 TB/s, 1 us per kernel, latencies of 2 and 5 us."""
    base = h100(nodes)
    gpu = replace(
        base.gpu,
        flops_per_s=1e12,
        efficiency_forward=1.0,
        efficiency_backward=1.0,
        memory_bandwidth_bytes_per_s=1e12,
        kernel_start_s=1e-6,
    )
    return replace(
        base,
        gpus_per_node=width,
        gpu=gpu,
        nvlink=Link(bandwidth_bytes_per_s=nvlink, latency_s=2e-6),
        nic=Link(bandwidth_bytes_per_s=nic, latency_s=5e-6),
        host_launch_s=10e-6,
    )


def planned(
    name: str,
    pattern: str,
    seqlen: int,
    cp: int,
    *,
    heads: int = 1,
    head_dim: int = 64,
    direction: Direction = FORWARD,
    width: int = 8,
) -> Program:
    problem = Problem(
        pattern=make_pattern(pattern, seqlen),
        heads_q=heads,
        heads_kv=heads,
        head_dim=head_dim,
        dtype=Dtype.BFLOAT16,
        cp=cp,
    )
    return verify(strategy(name).plan(problem, direction, Context(gpus_per_node=width)))


# By hand, to the nanosecond ----------------------------------------------------------------------


def test_two_rank_ring_hides_its_transfer() -> None:
    program = planned("ring", "full", 2048, 2)
    # Per rank 1024 queries and keys, one head of 64, bfloat16.
    # tile      1024 * 1024 * 4 * 64 flops at 1e12/s = 268.435456 us, and 1 us to start
    # k and v   2 * 1024 * 64 * 2 bytes at 1e11/s = 2.62144 us, and 2 us latency: hidden
    # fold      3 * (1024 * 64 * 4 + 1024 * 4) bytes at 1e12/s = 0.79872 us, in the second tile
    # finish    1024 * (64 * 4 + 4) + 1024 * (64 * 2 + 4) bytes at 1e12/s = 0.401408 us, and 1 us
    expected = 269.435456e-6 + (269.435456e-6 + 0.79872e-6) + 1.401408e-6
    trace = simulate(program, toy())

    assert trace.makespan_s == pytest.approx(expected, abs=NS)
    assert trace.exposed_comm_s == (0.0, 0.0)
    assert trace.overlap == 1.0
    assert trace.link_bytes == {"nvlink": 2 * 262144}


def test_two_rank_ring_waits_for_a_slow_transfer() -> None:
    program = planned("ring", "full", 2048, 2)
    # As above, but k and v take 262144 bytes at 1e8/s = 2621.44 us, and 2 us latency.
    expected = 2623.44e-6 + (269.435456e-6 + 0.79872e-6) + 1.401408e-6
    trace = simulate(program, toy(nvlink=1e8))

    assert trace.makespan_s == pytest.approx(expected, abs=NS)
    assert trace.exposed_comm_s == pytest.approx([2623.44e-6 - 269.435456e-6] * 2, abs=NS)
    assert trace.overlap == pytest.approx(269.435456 / 2623.44, rel=1e-9)


def test_four_rank_causal_ring_ends_when_the_first_keys_reached_the_last_rank() -> None:
    program = planned("ring", "causal", 2048, 4)
    # 512 tokens per rank. k and v of a rank: 2 * 512 * 64 * 2 = 131072 bytes at 1e9/s, and 2 us
    # latency = 133.072 us; the keys of rank 0 take three hops, each behind the one before.
    # tile      512 * 512 * 256 flops = 67.108864 us, and 1 us
    # fold      3 * 512 * 260 bytes = 0.39936 us
    # finish    512 * (260 + 132) bytes = 0.200704 us, and 1 us
    # Tiles of 68.5 us hide behind hops of 133 us, so only the last one shows.
    expected = 3 * 133.072e-6 + 68.108864e-6 + 0.39936e-6 + 1.200704e-6
    trace = simulate(program, toy(nvlink=1e9))
    # Diagonal tiles have 512 * 513 / 2 pairs: 33.619968 us, and 1 us.
    diagonal, full = 34.619968, 68.508224
    work = [diagonal + n * full for n in range(4)]

    assert trace.makespan_s == pytest.approx(expected, abs=NS)
    assert trace.imbalance_total == pytest.approx(max(work) * 4 / sum(work), rel=1e-9)
    # In lockstep: the diagonal, then three steps with at least one full tile.
    assert trace.imbalance_lockstep == pytest.approx(work[3] * 4 / sum(work), rel=1e-9)
    assert trace.link_bytes == {"nvlink": 6 * 131072}  # 3 + 2 + 1 hops: what nobody needs stays


def test_two_rank_ulysses_pays_its_turns_in_full() -> None:
    program = planned("ulysses", "full", 2048, 2, heads=2)
    # A leg has 1024 tokens of one head: 1024 * 64 * 2 bytes at 1e11/s = 1.31072 us. The turns of
    # q, k and v share a port, one after the other, behind one latency of 2 us.
    # tile      2048 * 2048 * 256 flops = 1073.741824 us, and 1 us
    # finish    2048 * (260 + 132) bytes = 0.802816 us, and 1 us
    # out       1.31072 us, and 2 us latency
    expected = (2 + 3 * 1.31072 + 1074.741824 + 1.802816 + 2 + 1.31072) * 1e-6
    trace = simulate(program, toy())

    assert trace.makespan_s == pytest.approx(expected, abs=NS)
    assert trace.link_bytes == {"nvlink": 4 * 2 * 131072}
    # Exposed: all but the local copies of q, k, v and out, 2 * 131072 bytes each at 1e12/s.
    exposed = 4 * (1.31072e-6 - 0.262144e-6)
    assert trace.exposed_comm_s == pytest.approx([exposed] * 2, abs=NS / 1000)


def test_four_rank_ulysses_on_two_nodes_waits_for_its_nics() -> None:
    program = planned("ulysses", "full", 2048, 4, heads=4, width=2)
    # A leg has 512 tokens of one head, 65536 bytes: 6.5536 us over a NIC, two of them per rank
    # and turn; over NVLink 0.65536 us, beside them. The latency of a turn is the NIC's 5 us.
    expected = (5 + 6 * 6.5536 + 1074.741824 + 1.802816 + 5 + 2 * 6.5536) * 1e-6
    trace = simulate(program, toy(width=2))

    assert trace.makespan_s == pytest.approx(expected, abs=NS)
    assert trace.link_bytes == {"nvlink": 4 * 4 * 65536, "nic": 4 * 8 * 65536}


def test_two_rank_ring_launched_by_the_host() -> None:
    program = planned("ring", "full", 4, 2)
    # Two tokens per rank: kernels of 1 us and a few ns. Each host launches in plan order, 10 us
    # each: both transfers, its tile, its second tile, its finish. The last kernel starts at 50 us.
    finish = 2 * (64 * 4 + 4 + 64 * 2 + 4) * 1e-12
    trace = simulate(program, toy(), runtime=Runtime.EAGER)

    assert trace.makespan_s == pytest.approx(50e-6 + 1e-6 + finish, abs=NS / 1000)


# What must always hold ---------------------------------------------------------------------------

NAMES = (
    "ring",
    "ring-classic",
    "zigzag",
    "stripe",
    "allgather",
    "ulysses",
    "usp",
    "double_ring",
)
PATTERNS = ("full", "causal", "window:left=40", "strided", "global_local", "star", "streaming")


@st.composite
def cases(draw: st.DrawFn) -> tuple[Program, Cluster, Runtime]:
    width = draw(st.sampled_from((1, 2, 3, 4, 8)))
    cp = draw(st.integers(1, 8))
    problem = Problem(
        pattern=make_pattern(draw(st.sampled_from(PATTERNS)), 16 * draw(st.integers(8, 2000))),
        heads_q=8,
        heads_kv=draw(st.sampled_from((1, 2, 8))),
        head_dim=64,
        dtype=Dtype.BFLOAT16,
        cp=cp,
    )
    base = h100(8)
    speeds = st.floats(1e8, 1e12)
    machine = replace(
        base,
        gpus_per_node=width,
        nvlink=replace(base.nvlink, bandwidth_bytes_per_s=draw(speeds)),
        nic=replace(base.nic, bandwidth_bytes_per_s=draw(speeds)),
    )
    direction = draw(st.sampled_from(list(Direction)))
    try:
        plan = strategy(draw(st.sampled_from(NAMES))).plan(
            problem, direction, Context(gpus_per_node=width)
        )
    except UnsupportedError:
        plan = strategy("zigzag").plan(problem, direction)
    return verify(plan), machine, draw(st.sampled_from(list(Runtime)))


@given(cases(), st.sampled_from(list(Dispatch)))
def test_makespan_is_between_the_bound_and_the_serial_sum(
    case: tuple[Program, Cluster, Runtime], dispatch: Dispatch
) -> None:
    program, machine, runtime = case
    limits = bounds(program, machine, runtime)
    makespan_s = simulate(program, machine, runtime=runtime, dispatch=dispatch).makespan_s
    slack = 1 + 1e-9

    assert limits.bound_s <= makespan_s * slack
    assert limits.critical_path_s <= makespan_s * slack
    assert makespan_s <= limits.serial_s * slack


@given(cases(), st.sampled_from(("flops", "memory", "nvlink", "nic", "host")), st.floats(1, 10))
def test_more_bandwidth_is_never_slower(
    case: tuple[Program, Cluster, Runtime], what: str, factor: float
) -> None:
    program, machine, runtime = case
    gpu = machine.gpu
    match what:
        case "flops":
            better = replace(machine, gpu=replace(gpu, flops_per_s=gpu.flops_per_s * factor))
        case "memory":
            faster = gpu.memory_bandwidth_bytes_per_s * factor
            better = replace(machine, gpu=replace(gpu, memory_bandwidth_bytes_per_s=faster))
        case "host":
            better = replace(machine, host_launch_s=machine.host_launch_s / factor)
        case _:
            link = machine.nvlink if what == "nvlink" else machine.nic
            link = replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor)
            better = (
                replace(machine, nvlink=link) if what == "nvlink" else replace(machine, nic=link)
            )
    before = simulate(program, machine, runtime=runtime)
    after = simulate(program, better, runtime=runtime)

    assert after.makespan_s <= before.makespan_s * (1 + 1e-12)
    begun = {(s.rank, s.stream, s.task, s.size_bytes): s.end_s for s in before.spans}
    assert all(
        s.end_s <= begun[s.rank, s.stream, s.task, s.size_bytes] * (1 + 1e-12)
        for s in after.spans
        if not isinstance(program.plan.tasks[s.task], Collective)  # a rank may have equal legs
    )


def test_list_scheduling_can_lose_to_a_slower_gpu() -> None:
    """Graham's anomaly, and why in-order streams are the default."""
    machine = replace(h100(8), gpus_per_node=2)
    program = planned(
        "double_ring",
        "strided",
        16384,
        6,
        heads=8,
        head_dim=128,
        direction=BACKWARD,
        width=2,
    )
    faster = replace(machine, gpu=replace(machine.gpu, flops_per_s=machine.gpu.flops_per_s * 1.402))

    def makespans(dispatch: Dispatch) -> list[float]:
        return [simulate(program, c, dispatch=dispatch).makespan_s for c in (machine, faster)]

    slow, fast = makespans(Dispatch.GREEDY)
    assert fast > 1.2 * slow
    slow, fast = makespans(Dispatch.IN_ORDER)
    assert fast <= slow


@given(cases(), st.sampled_from(list(Dispatch)), st.randoms(use_true_random=False))
def test_equal_plans_give_equal_traces_however_they_are_written(
    case: tuple[Program, Cluster, Runtime], dispatch: Dispatch, rng: random.Random
) -> None:
    program, machine, runtime = case
    first = simulate(program, machine, runtime=runtime, dispatch=dispatch)
    shuffled = replace(program, plan=_shuffled(program.plan, rng))
    second = simulate(shuffled, machine, runtime=runtime, dispatch=dispatch)

    assert first == simulate(program, machine, runtime=runtime, dispatch=dispatch)
    assert first.spans == second.spans


def _shuffled(plan: Plan, rng: random.Random) -> Plan:
    """The same plan with edges and legs, which have no order of their own, written otherwise."""
    tasks = []
    for task in plan.tasks:
        after = list(task.after)
        rng.shuffle(after)
        changed = replace(task, after=tuple(after))
        if isinstance(changed, Collective):
            legs = list(changed.legs)
            rng.shuffle(legs)
            changed = replace(changed, legs=tuple(legs))
        tasks.append(changed)
    return replace(plan, tasks=tuple(tasks))


@given(cases(), st.sampled_from(list(Dispatch)))
def test_nothing_overlaps_on_a_stream_or_starts_before_what_it_waits_for(
    case: tuple[Program, Cluster, Runtime], dispatch: Dispatch
) -> None:
    program, machine, runtime = case
    trace = simulate(program, machine, runtime=runtime, dispatch=dispatch)
    last: dict[tuple[int, Stream], float] = {}
    first: dict[int, float] = {}
    done: dict[int, float] = {}
    for span in trace.spans:
        key = (span.rank, span.stream)
        assert span.start_s >= last.get(key, 0.0)
        last[key] = span.end_s
        if span.stream is not Stream.LAUNCH:
            first[span.task] = min(span.start_s, first.get(span.task, span.start_s))
            done[span.task] = max(span.end_s, done.get(span.task, 0.0))
    for index, task in enumerate(program.plan.tasks):
        assert index in first
        assert all(done[earlier] <= first[index] for earlier in task.after)


# Published facts ---------------------------------------------------------------------------------


def test_a_ring_across_nodes_wastes_three_quarters_of_the_nics_of_a_node() -> None:
    """The example of UltraAttn, figure 3: nodes of 4 GPUs, 2 of 8 NIC directions in use."""
    machine = toy(nvlink=1e13, nic=1e8, width=4, nodes=3)
    machine = replace(machine, gpu=replace(machine.gpu, flops_per_s=1e18))
    ports = (Stream.NIC_OUT, Stream.NIC_IN)

    def used(name: str) -> tuple[set[tuple[int, Stream]], float, float]:
        program = planned(name, "full", 12 * 512, 12, width=4)
        trace = simulate(program, machine)
        streams = {key for key in trace.busy_s if key[1] in ports}
        return streams, trace.utilisation(ports), trace.makespan_s

    ring, ring_share, ring_s = used("ring")
    grouped, grouped_share, grouped_s = used("double_ring")

    # Each node sends from its last rank and receives on its first.
    assert ring == {(r, Stream.NIC_OUT) for r in (3, 7, 11)} | {
        (r, Stream.NIC_IN) for r in (0, 4, 8)
    }
    assert 1 - len(ring) / (3 * 8) == 0.75
    assert 1 - ring_share == pytest.approx(0.75, abs=0.01)
    # Group by group, all eight directions of a node carry bytes, all the time.
    assert len(grouped) == 3 * 8
    assert grouped_share > 0.98
    # 11 chunks through one card, or 8 chunks through four.
    assert ring_s / grouped_s == pytest.approx(11 / 2, rel=0.02)


@pytest.mark.parametrize(("cp", "direction"), [(8, FORWARD), (8, BACKWARD), (64, FORWARD)])
def test_zigzag_beats_ring_on_causal(cp: int, direction: Direction) -> None:
    ring, zigzag = (
        simulate(
            planned(name, "causal", 1 << 19, cp, heads=32, head_dim=128, direction=direction),
            cluster("h100-8x8"),
        )
        for name in ("ring", "zigzag")
    )

    assert zigzag.makespan_s < ring.makespan_s
    assert zigzag.imbalance_total < 1.05
    assert ring.imbalance_total > 1.8


@pytest.mark.parametrize(("cp", "imbalance"), [(8, 15 / 8), (64, 127 / 64)])
def test_contiguous_causal_allgather_takes_twice_its_share(cp: int, imbalance: float) -> None:
    """The last of cp ranks has cp - 1/2 of the blocks, the mean is cp / 2."""
    contiguous, zigzag = (
        simulate(planned(name, "causal", 1 << 19, cp, heads=32, head_dim=128), cluster("h100-8x8"))
        for name in ("allgather", "allgather:placement=zigzag")
    )
    slowest = [
        max(t.busy_s[rank, Stream.COMPUTE] for rank in range(cp)) for t in (contiguous, zigzag)
    ]

    assert contiguous.imbalance_total == pytest.approx(imbalance, rel=0.01)
    assert zigzag.imbalance_total == pytest.approx(1.0, rel=0.01)
    assert slowest[0] / slowest[1] == pytest.approx(imbalance, rel=0.02)


@pytest.mark.parametrize("width", [8, 1])
def test_a_ring_hides_its_transfers_from_a_block_length_of_flops_over_bandwidth(width: int) -> None:
    """Ring Attention: 4 h c c / F >= 4 c h / B, so c >= F / B, where nothing else takes time."""
    base = h100(8)
    machine = replace(
        base,
        gpus_per_node=width,
        gpu=replace(base.gpu, memory_bandwidth_bytes_per_s=1e30, kernel_start_s=0.0),
        nvlink=replace(base.nvlink, latency_s=0.0),
        nic=replace(base.nic, latency_s=0.0),
    )
    flops_per_s = machine.gpu.attention_flops_per_s(Dtype.BFLOAT16, FORWARD)
    link = machine.nvlink if width == 8 else machine.nic
    least = flops_per_s / link.bandwidth_bytes_per_s

    def exposed(block: int) -> float:
        program = planned("ring", "full", 4 * block, 4, heads=32, head_dim=128, width=width)
        trace = simulate(program, machine)
        return trace.exposed_comm_max_s / trace.makespan_s

    assert least == pytest.approx(923 if width == 8 else 8311, abs=1)
    assert exposed(int(least) + 1) < 1e-9
    assert exposed(2 * int(least)) < 1e-9
    assert exposed(int(least * 0.98)) > 0.01
    assert exposed(int(least / 2)) > 0.4


def test_the_overlap_rule_holds_on_the_preset_too() -> None:
    """Latencies, folding and kernel starts move the threshold, by less than a factor of two."""

    def exposed(block: int) -> float:
        program = planned("ring", "full", 8 * block, 8, heads=32, head_dim=128)
        return simulate(program, cluster("h100-8x8")).exposed_comm_max_s

    assert exposed(2 * 923) == 0.0
    assert exposed(923 // 2) > 0.0
