from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from harness.cluster.calibration import FOLDER, calibration
from harness.cluster.effects import ALL, Effect
from harness.cluster.machine import Runtime
from harness.cluster.presets import cluster
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.residency import Program
from harness.planning.strategy import Context
from harness.prepare.scalable_plan import planned_at, structure
from harness.prepare.scalable_plan_cache import structure_of
from harness.records.cell import Status
from harness.records.config import Config, Where
from harness.reproduce.case import Case
from harness.reproduce.published_runs import baseline_convention
from harness.simulate.bounds import jobs_bound_s
from harness.simulate.calibrated import full_clock, predict, pricer, skeleton_on, trust
from harness.simulate.jobs import NeedKind
from harness.simulate.queues import Stream
from harness.simulate.simulator import simulate
from harness.simulate.tile_calls import TimedCall
from harness.sweep.simulate_cells import simulate_cell
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import strategy

H800 = calibration("h800")
CORELESS = replace(calibration("local-cpu").hardware, cores=None)
CELL = Config(
    strategy="zigzag",
    pattern="causal",
    cp=4,
    seqlen_q=65536,
    seqlen_kv=65536,
    heads_q=6,
    heads_kv=2,
    head_dim=128,
    batch=2,
    dtype=Dtype.BFLOAT16,
    direction=Direction.BACKWARD,
    transport=Where.SIMULATED,
    cluster="h800",
    runtime=Runtime.GRAPH,
)
NAMES = ("ring", "zigzag", "stripe", "allgather", "ulysses", "usp:2x2", "owner", "grid")


def program(cell: Config) -> Program:
    plan = strategy(cell.strategy).plan(cell.problem, cell.direction, Context(gpus_per_node=8))
    return verify(plan)


@pytest.mark.parametrize("runtime", Runtime)
@pytest.mark.parametrize(("name", "cp"), [*((n, 4) for n in NAMES[:4]), ("usp:2x8", 16)])
def test_folding_changes_no_predicted_time(name: str, cp: int, runtime: Runtime) -> None:
    cell = replace(CELL, strategy=name, cp=cp, pattern="full", heads_q=4)
    made = program(cell)
    eager = runtime is Runtime.EAGER
    prices = pricer(cell.problem, cell.direction, H800, eager=eager)
    whole, folded = (skeleton_on(made, H800, eager=eager, fold=f) for f in (False, True))
    if runtime is Runtime.GRAPH:
        assert len(folded.parts) < len(whole.parts)
    for effects in (ALL, *(ALL - {effect} for effect in sorted(ALL))):
        prices.effects = effects
        # To the bit but for the order of sums.
        assert prices.seconds_of(whole) == pytest.approx(prices.seconds_of(folded), rel=1e-12)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", ["ring", "ulysses", "usp:2x2", "owner"])
def test_ranks_on_one_core_take_the_sum_of_their_work(name: str, direction: Direction) -> None:
    cell = replace(CELL, strategy=name, pattern="star", heads_q=8, heads_kv=4, direction=direction)
    fitted = calibration("local-cpu")
    one, many = (
        replace(fitted, hardware=replace(fitted.hardware, cores=cores)) for cores in (1, 1000)
    )
    # Without the effects of neighbours a job takes one time, and a core is never idle.
    effects = frozenset({Effect.MERGE, Effect.IMBALANCE})
    shared, alone = (
        pricer(cell.problem, direction, each, eager=False, effects=effects) for each in (one, many)
    )
    shape = skeleton_on(program(cell), one, eager=False)
    jobs = alone.jobs(shape)
    assert shared.seconds_of(shape) == pytest.approx(sum(j.cores * j.seconds[0] for j in jobs))
    assert shared.seconds_of(shape) > 3 * alone.seconds_of(shape)
    # What every rank has to itself may be folded.
    folded = skeleton_on(program(cell), replace(fitted, hardware=CORELESS), eager=False)
    assert alone.seconds_of(shape) == pytest.approx(alone.seconds_of(folded), rel=1e-12)


def test_what_is_kept_of_a_plan_folds_nothing_where_ranks_share_cores(tmp_path: Path) -> None:
    fitted = calibration("local-cpu")
    apart = replace(fitted, hardware=CORELESS)
    cell = planned_at(replace(CELL, strategy="allgather", pattern="full", cluster=None))
    folded, whole = (len(structure_of(cell, f, tmp_path).shape.parts) for f in (apart, fitted))
    assert folded < whole


@pytest.mark.parametrize(("name", "pattern"), list(product(NAMES, ["full", "causal", "star"])))
def test_a_plan_of_one_length_gives_the_times_and_bytes_of_longer_ones(
    name: str, pattern: str, tmp_path: Path
) -> None:
    cell = replace(CELL, strategy=name, pattern=pattern, heads_kv=6 if "u" in name else 2)
    cell = replace(cell, heads_q=12, heads_kv=4)
    small = planned_at(cell)
    assert small.seqlen_q == 8192
    record = simulate_cell(cell, {}, folder=tmp_path)
    assert (record.status, record.planned_tokens) == (Status.OK, 8192)
    large = structure(program(cell), H800, eager=False)
    for key in ("peak_bytes", "sent_bytes", "link_bytes"):
        name_of = {"sent_bytes": "bytes_sent_per_rank"}.get(key, key)
        assert getattr(record, name_of) == getattr(large, key)
    time_s = pricer(cell.problem, cell.direction, H800, eager=False).seconds_of(large.shape)
    assert record.time_s == pytest.approx(time_s, rel=2e-3)
    assert record.imbalance == pytest.approx(large.imbalance, rel=2e-3)
    kept = list(tmp_path.rglob("*.json.z"))
    assert len(kept) == 1
    again = simulate_cell(replace(cell, seqlen_q=131072, seqlen_kv=131072), {}, folder=tmp_path)
    assert again.plan_hash == record.plan_hash
    kept[0].write_bytes(b"torn")
    for answer in tmp_path.rglob("*.json"):
        answer.unlink()
    assert simulate_cell(cell, {}, folder=tmp_path).time_s == record.time_s


def test_a_predicted_cell_is_kept_for_its_cluster_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = replace(CELL, seqlen_q=8192, seqlen_kv=8192)
    first = simulate_cell(cell, {}, folder=tmp_path)
    (answer,) = tmp_path.rglob("*.json")
    with monkeypatch.context() as patch:
        patch.setattr(
            "harness.sweep.simulate_cells.structure_of", None
        )  # it would be called to plan
        again = simulate_cell(cell, {}, folder=tmp_path)
        assert replace(again, recorded_at="then") == replace(first, recorded_at="then")
        machine = cluster("h800")
        slower = replace(machine.gpu, memory_bytes=machine.gpu.memory_bytes - 1)
        patch.setattr(
            "harness.sweep.simulate_cells.cluster", lambda _: replace(machine, gpu=slower)
        )
        assert simulate_cell(cell, {}, folder=tmp_path).status == Status.ERROR
    answer.write_bytes(answer.read_bytes()[:-7])
    assert simulate_cell(cell, {}, folder=tmp_path).time_s == first.time_s


@pytest.mark.parametrize("tokens", [2048, 4096])
@pytest.mark.parametrize(("name", "pattern"), list(product(NAMES, ["full", "causal", "star"])))
def test_a_plan_of_one_length_gives_the_times_and_bytes_of_shorter_ones(
    name: str, pattern: str, tokens: int, tmp_path: Path
) -> None:
    cell = replace(CELL, strategy=name, pattern=pattern, heads_q=12, heads_kv=4)
    cell = replace(cell, seqlen_q=tokens, seqlen_kv=tokens)
    assert planned_at(cell).seqlen_q == 8192
    record = simulate_cell(cell, {}, folder=tmp_path)
    assert (record.status, record.planned_tokens) == (Status.OK, 8192)
    exact = structure(program(cell), H800, eager=False)
    assert record.peak_bytes == exact.peak_bytes
    assert record.peak_bytes_algorithm == exact.peak_bytes_algorithm
    assert record.bytes_sent_per_rank == exact.sent_bytes
    assert record.link_bytes == exact.link_bytes
    time_s = pricer(cell.problem, cell.direction, H800, eager=False).seconds_of(exact.shape)
    assert record.time_s == pytest.approx(time_s, rel=4e-3)


@pytest.mark.parametrize("pattern", ["window:left=4095,right=0", "causal"])
def test_what_does_not_scale_is_planned_as_it_is(pattern: str) -> None:
    odd = replace(CELL, pattern=pattern, seqlen_q=65537, seqlen_kv=65537)
    assert planned_at(odd) == odd
    even = replace(CELL, pattern=pattern)
    assert (planned_at(even) == even) is pattern.startswith("window")


@pytest.mark.parametrize("runtime", Runtime)
@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_runs_under_all_runtimes_and_eager_is_never_faster(
    name: str, runtime: Runtime
) -> None:
    cell = replace(CELL, strategy=name, heads_q=4, heads_kv=4, seqlen_q=4099, seqlen_kv=4099)
    made = program(cell)
    trace = simulate(made, cluster("h800"), runtime=runtime)
    eager, own = runtime.eager, runtime.own_stream
    prices = pricer(cell.problem, cell.direction, H800, eager=eager, own_stream=own)
    shape = skeleton_on(made, H800, eager=eager)
    assert trace.makespan_s == pytest.approx(prices.seconds_of(shape), rel=1e-12)
    assert jobs_bound_s(prices.jobs(shape)) <= trace.makespan_s
    launches = [span for span in trace.spans if span.stream is Stream.LAUNCH]
    assert bool(launches) is eager
    graph = simulate(made, cluster("h800"), runtime=Runtime.GRAPH)
    assert graph.makespan_s <= trace.makespan_s
    assert graph.link_bytes == dict(structure(made, H800, eager=eager).link_bytes)


@pytest.mark.parametrize(
    ("tokens", "dtype", "inside"),
    [
        (8192, Dtype.BFLOAT16, True),
        (2048, Dtype.BFLOAT16, False),  # 512 queries a rank, of heads that share keys
        (512, Dtype.BFLOAT16, False),  # 64 tokens a chunk: fewer than were measured
        (2**21, Dtype.BFLOAT16, False),
        (8192, Dtype.FLOAT32, False),
    ],
)
def test_a_calibrated_cluster_says_whether_it_was_measured_there(
    tokens: int, dtype: Dtype, inside: bool
) -> None:
    cell = replace(CELL, strategy="ring", seqlen_q=tokens, seqlen_kv=tokens, dtype=dtype)
    prices = pricer(cell.problem, cell.direction, H800, eager=False)
    shape = skeleton_on(program(cell), H800, eager=False)
    said = trust(cell.problem, shape, prices, prices.seconds_of(shape))
    assert said.inside is inside
    assert (said.expected_error is None) is not inside  # unknown is null, also in `simulate --json`
    assert said.text.endswith("), error unknown") is not inside
    assert ("OUTSIDE its range" in said.text) is not inside
    assert said.calibration_id == H800.id


def test_every_simulated_record_says_how_far_to_trust_it(tmp_path: Path) -> None:
    record = simulate_cell(CELL, {}, folder=tmp_path)
    assert record.calibration_id == H800.id
    assert record.inside_range is True
    known = {(one.mean, one.p90) for one in H800.validated}
    assert (record.expected_error, record.expected_error_p90) in known
    assert f"{record.expected_error:.0%} (9 in 10 within" in record.calibration
    assert "kernel flash-attn-2" in record.calibration
    datasheet = simulate_cell(replace(CELL, cluster="h100-8x8"), {}, folder=tmp_path)
    assert datasheet.expected_error is datasheet.inside_range is None
    assert "not calibrated" in datasheet.calibration


def test_a_file_of_ones_own_is_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = (FOLDER / "h800.toml").read_text()
    path.write_text(text.replace('id = "h800/', 'id = "mine/').replace("nodes = 8 ", "nodes = 3 "))
    mine = cluster(str(path))
    assert (mine.name, mine.gpus) == ("mine", 24)
    record = simulate_cell(replace(CELL, cluster=str(path)), {}, folder=tmp_path)
    usual = simulate_cell(CELL, {}, folder=tmp_path)
    assert record.time_s == usual.time_s
    assert str(record.calibration_id).startswith("mine/")
    with pytest.raises(ValueError, match="cannot be read"):
        cluster(str(tmp_path / "none.toml"))
    with pytest.raises(ValueError, match=r"h100-8x8, h100-1x8, .*calibrate"):
        cluster("b200")


@pytest.mark.parametrize("way", Direction)
def test_eager_transfers_between_nodes_come_beside_what_a_kernel_begins_and_ends_with(
    way: Direction,
) -> None:
    cell = replace(CELL, strategy="ring", cp=12, seqlen_q=49152, seqlen_kv=49152, direction=way)
    made = program(cell)
    for eager in (True, False):
        prices = pricer(cell.problem, way, H800, eager=eager)
        shape = skeleton_on(made, H800, eager=eager, fold=False)
        for part, job in zip(shape.parts, prices.jobs(shape), strict=True):
            if part.need.kind is NeedKind.TRANSFER:
                assert job.messages == (2 if eager else 1)  # k and v, or dk and dv
                assert job.patient is (eager and part.need.far)
                assert job.early is (job.patient and way is Direction.BACKWARD)
            elif part.need.kind is NeedKind.TILE:
                folds = prices.fold_s(part.need) if any(part.need.size) else 0.0
                assert job.tail_s == folds
                assert min(job.seconds) > job.tail_s
    assert any(part.need.far for part in shape.parts)
    assert any(job.tail_s for job in prices.jobs(shape))


def test_a_plan_of_unequal_work_is_bound_by_its_busiest_rank(tmp_path: Path) -> None:
    # Of a causal ring of 4 the last rank has 7 of 16 parts of the work, 1.75 times the mean.
    cell = replace(CELL, strategy="ring")
    record = simulate_cell(cell, {}, folder=tmp_path)
    times = [record.bound_s, record.plan_bound_s, record.time_s]
    assert times == sorted(times)
    assert record.plan_bound_s > 1.5 * record.bound_s


@pytest.mark.parametrize("label", ["ring", "zigzag", "stripe"])
@pytest.mark.parametrize("way", Direction)
def test_causal_calls_of_published_runs_are_flash_attns(label: str, way: Direction) -> None:
    """Their diagonal ends in the last row and column; that of a plan's own call begins in both."""
    kernels = calibration("a100").kernels
    problem = Problem(
        pattern=make_pattern("causal", 6144),
        heads_q=3,
        heads_kv=1,
        head_dim=128,
        dtype=Dtype.BFLOAT16,
        cp=2,
    )
    prices = pricer(problem, way, calibration("a100"), eager=True)
    published = replace(prices, convention=baseline_convention(run(label, way)))
    ended, begun = (
        kernels.seconds(way, 6144, 2048, 3, causal=True, ends_last=last) for last in (True, False)
    )
    tall = TimedCall(6144, 2048, 3, True, 1.0)
    assert replace(published, heads=1).call_s(kernels, tall, 0) == ended
    assert replace(prices, heads=1).call_s(kernels, tall, 0) == begun
    assert ended < begun


def run(label: str, way: Direction) -> Case:
    return Case(
        gpu="A100",
        nodes=1,
        gpus_per_node=4,
        pattern="causal",
        direction="fwd" if way is Direction.FORWARD else "bwd",
        strategy=label,
        heads=3,
        seqlen_q=49152,
        seqlen_kv=16384,
        rows=0,
        mode="normal",
        measured_s=1.0,
        author_s=None,
    )


@pytest.mark.parametrize("name", ["h100-8x8", "h100-1x8", "h800", "local-cpu"])
def test_the_full_clock_times_measured_clusters_in_the_plan_s_order_only(name: str) -> None:
    machine = cluster(name)
    assert full_clock(machine) == machine.fitted
    assert (machine.fitted is None) is name.startswith("h100")
    assert full_clock(machine, in_plan_order=False) is None


@pytest.mark.parametrize("direction", Direction)
def test_a_folded_prediction_takes_as_long_as_the_whole_timeline(direction: Direction) -> None:
    cell = replace(CELL, strategy="zigzag", direction=direction)
    made = program(cell)
    prices = pricer(cell.problem, direction, H800, eager=False)
    said = predict(skeleton_on(made, H800, eager=False), cell.problem, prices)
    trace = simulate(made, cluster("h800"))
    assert said.time_s == trace.makespan_s
    assert said.exposed_s == pytest.approx(trace.exposed_comm_max_s, rel=1e-12)
    assert 0 < said.bound_s <= said.time_s
    assert trace.calibration.startswith(said.trust.text)
