"""Comparing result sets: what counts as a change, on made-up noise and on real sweeps."""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from harness.measure.cells import measure_cells
from harness.plan.problem import Direction
from harness.records.cell import CellRecord, Status
from harness.records.config import Config, Where
from harness.report.compare import ChangeKind, compare
from harness.sweep.limits import Limits
from tests.harness.made import changed, record

NOISE = 0.04  # relative, of a sample
STRATEGIES = ("ring", "zigzag", "stripe", "ulysses", "usp", "allgather")
CONFIG = Config(
    strategy="ring",
    pattern="causal",
    cp=2,
    seqlen_q=64,
    seqlen_kv=64,
    heads_q=2,
    heads_kv=2,
    head_dim=16,
    transport=Where.GLOO,
)


def cells(strategies: Sequence[str] = STRATEGIES) -> list[Config]:
    return [
        replace(CONFIG, strategy=name, cp=cp, direction=direction)
        for name in strategies
        for cp in (2, 4)
        for direction in Direction
    ]


def entry(config: Config, samples: Sequence[float], **values: object) -> CellRecord:
    given: dict[str, object] = {
        "plan_hash": "aa",
        "bytes_sent_per_rank": 100,
        "peak_bytes": 1000,
        "max_rel_error": {"out": 1e-7},
    }
    return record(
        config,
        Status.OK,
        {"python": "3.12", "packages": {"torch": "2"}},
        time_s=statistics.median(samples),
        samples_s=list(samples),
        **(given | values),
    )


def noisy(seed: int, slow: Callable[[Config], float] = lambda _: 1.0) -> list[CellRecord]:
    """A sweep of 24 cells, each with its own speed, 20 samples, and now and then a stray one."""
    noise = random.Random(seed)
    found = []
    for number, config in enumerate(cells()):
        base = 0.01 * (1 + number) * slow(config)
        samples = [base * noise.lognormvariate(0, NOISE) for _ in range(20)]
        samples[noise.randrange(20)] *= 4
        found.append(entry(config, samples))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_two_runs_of_the_same_report_no_change(seed: int) -> None:
    found = compare(noisy(seed), noisy(1000 + seed))

    assert found.changes == ()
    assert found.matched == found.unchanged == 24


@pytest.mark.parametrize("seed", range(40))
def test_a_strategy_slowed_by_a_fifth_is_reported_and_only_that(seed: int) -> None:
    slowed = noisy(1000 + seed, lambda config: 1.2 if config.strategy == "usp" else 1.0)
    found = compare(noisy(seed), slowed)

    assert {change.strategy for change in found.changes} == {"usp"}
    assert {change.kind for change in found.changes} == {ChangeKind.SLOWER}
    assert len(found.changes) == 4
    assert all(change.ratio == pytest.approx(1.2, rel=0.1) for change in found.changes)

    backwards = compare(slowed, noisy(seed))
    assert {change.kind for change in backwards.changes} == {ChangeKind.FASTER}
    assert len(backwards.changes) == 4


@pytest.mark.parametrize(("count", "judged"), [(20, True), (19, False)])
def test_a_stray_sample_counts_where_there_are_too_few_for_bands(count: int, judged: bool) -> None:
    before, after = [1.0] * (count - 1) + [2.0], [1.5] * count
    found = compare([entry(CONFIG, before)], [entry(CONFIG, after)])
    assert [change.kind for change in found.changes] == [ChangeKind.SLOWER] * judged
    assert found.not_judged == ()


@pytest.mark.parametrize(("count", "judged"), [(5, True), (4, False)])
def test_fewer_than_5_samples_are_not_judged(count: int, judged: bool) -> None:
    found = compare([entry(CONFIG, [1.0] * count)], [entry(CONFIG, [1.5] * count)])
    assert [change.kind for change in found.changes] == [ChangeKind.SLOWER] * judged
    assert len(found.not_judged) == (not judged)


def test_an_error_of_a_result_that_is_not_finite_has_grown() -> None:
    samples = [1.0] * 20
    new = entry(CONFIG, samples, max_rel_error={"out": None})
    (change,) = compare([entry(CONFIG, samples)], [new]).changes
    assert (change.kind, change.worse, change.after) == (ChangeKind.ERROR, True, None)
    assert compare([new], [new]).changes == ()


def test_what_failed_before_and_fails_otherwise_is_no_worse() -> None:
    failed, refused = (
        record(CONFIG, status, {}, reason=str(status)) for status in (Status.ERROR, Status.ILLEGAL)
    )
    (change,) = compare([failed], [refused]).changes
    assert (change.kind, change.worse, change.detail) == (ChangeKind.STATUS, False, "illegal")


def test_a_change_names_its_cell_and_the_bands_in_seconds() -> None:
    config = replace(CONFIG, seqlen_kv=96)
    (change,) = compare([entry(config, [1.0] * 20)], [entry(config, [1.5] * 20)]).changes
    assert change.cell == (f"causal cp=2 S=64/96 heads=2/2 D=16 B=1 {CONFIG.dtype} forward on gloo")
    assert change.detail == "1 to 1 s before, 1.5 to 1.5 s after"


def restless(seed: int, slow: Callable[[Config], float] = lambda _: 1.0) -> list[CellRecord]:
    """As `noisy`, on a machine that other work slows for whole cells at a time."""
    load = random.Random(-seed)
    factors = {config: load.lognormvariate(0, 0.3) for config in cells()}
    return noisy(seed, lambda config: factors[config] * slow(config))


def test_a_restless_machine_raises_the_threshold() -> None:
    found = [compare(restless(seed), restless(1000 + seed)) for seed in range(40)]
    steady = compare(noisy(0), noisy(1))

    assert steady.scatter is not None
    assert steady.scatter < 0.1
    assert all(each.scatter is not None and each.scatter > 0.5 for each in found)
    cells_changed = sum(len(each.changes) for each in found)
    assert cells_changed < 0.02 * 40 * 24  # by the plain rule about 0.7 of them


@pytest.mark.parametrize("seed", range(10))
def test_a_strategy_slowed_as_a_whole_adds_nothing_to_the_scatter(seed: int) -> None:
    def two(records: list[CellRecord]) -> list[CellRecord]:
        return [entry for entry in records if entry.config.strategy in ("ring", "usp")]

    slowed = two(noisy(1000 + seed, lambda config: 1.2 if config.strategy == "usp" else 1.0))
    found = compare(two(noisy(seed)), slowed)

    assert found.scatter is not None
    assert found.scatter < 0.15
    assert [change.strategy for change in found.changes] == ["usp"] * 4


def test_few_cells_tell_nothing_of_the_scatter() -> None:
    def first(count: int) -> list[list[CellRecord]]:
        return [noisy(seed)[:count] for seed in (1, 2)]

    assert compare(*first(7)).scatter is None
    assert compare(*first(8)).scatter is not None
    # Twelve cells, but two of each strategy: they cannot tell their own change from the scatter.
    pairs = [[entry for entry in noisy(seed) if entry.config.cp == 2] for seed in (1, 2)]
    assert compare(*pairs).scatter is None


def test_a_set_equals_itself() -> None:
    sweep = noisy(3)
    assert compare(sweep, sweep).changes == ()


def test_a_shift_inside_the_spread_is_no_change() -> None:
    wide = [0.8 + 0.02 * i for i in range(21)]  # p20 0.88, p80 1.12
    shifted = [1.2 * sample for sample in wide]  # p20 1.056
    assert compare([entry(CONFIG, wide)], [entry(CONFIG, shifted)]).changes == ()

    apart = [1.3 * sample for sample in wide]  # p20 1.144
    assert len(compare([entry(CONFIG, wide)], [entry(CONFIG, apart)]).changes) == 1


def test_a_shift_below_the_threshold_is_no_change_however_sharp() -> None:
    one, other = [entry(CONFIG, [1.0] * 20)], [entry(CONFIG, [1.09] * 20)]

    assert compare(one, other).changes == ()
    assert len(compare(one, other, threshold=0.08).changes) == 1


def test_few_samples_must_be_wholly_apart_and_very_few_are_not_judged() -> None:
    outlier = [1.0] * 9 + [1.5]
    one, other = [entry(CONFIG, outlier)], [entry(CONFIG, [1.3] * 10)]
    assert compare(one, other).changes == ()
    assert len(compare([entry(CONFIG, [1.0] * 10)], other).changes) == 1

    few = compare([entry(CONFIG, [1.0] * 4)], [entry(CONFIG, [9.0] * 20)])
    assert few.changes == ()
    assert len(few.not_judged) == 1
    assert "ring causal" in few.not_judged[0]


def test_simulated_times_have_no_spread() -> None:
    config = replace(CONFIG, transport=Where.SIMULATED, cluster="h100-1x8")
    one, same, other = (
        [changed(entry(config, [1.0]), time_s=time_s, samples_s=[])]
        for time_s in (1.0, 1.0 + 1e-12, 1.001)
    )

    assert compare(one, same).changes == ()
    assert compare(one, same).not_judged == ()
    (change,) = compare(one, other).changes
    assert (change.kind, change.before, change.after) == (ChangeKind.SLOWER, 1.0, 1.001)


def test_status_missing_and_extra_cells_are_changes() -> None:
    a, b, c = cells()[:3]
    failed = record(a, Status.TIMEOUT, {}, reason="no answer from rank 1")
    found = compare([entry(a, [1.0] * 20), entry(b, [1.0] * 20)], [failed, entry(c, [1.0] * 20)])

    summary = [(x.kind, x.config_hash, x.before, x.after) for x in found.changes]
    assert summary == [
        (ChangeKind.STATUS, a.hash, "ok", "timeout"),
        (ChangeKind.MISSING, b.hash, "ok", None),
        (ChangeKind.EXTRA, c.hash, None, "ok"),
    ]
    assert found.changes[0].detail == "no answer from rank 1"
    assert (found.matched, found.unchanged) == (1, 0)


@pytest.mark.parametrize(
    ("name", "value"), [("plan_hash", "bb"), ("bytes_sent_per_rank", 101), ("peak_bytes", 999)]
)
def test_exact_figures_that_differ_are_changes(name: str, value: object) -> None:
    one, other = entry(CONFIG, [1.0] * 20), entry(CONFIG, [1.0] * 20, **{name: value})
    (change,) = compare([one], [other]).changes

    assert (change.kind, change.before, change.after) == (
        ChangeKind(name),
        getattr(one, name),
        value,
    )
    assert change.ratio is None


def test_an_error_grew_if_it_more_than_doubled() -> None:
    def with_errors(**errors: float) -> list[CellRecord]:
        return [entry(CONFIG, [1.0] * 20, max_rel_error=errors)]

    before = with_errors(dq=1e-7, dk=1e-7, dv=0.0)
    assert compare(before, with_errors(dq=2e-7, dk=1e-9, dv=0.0)).changes == ()
    found = compare(before, with_errors(dq=2.1e-7, dk=1e-7, dv=1e-9)).changes
    assert [(change.kind, change.detail) for change in found] == [
        (ChangeKind.ERROR, "dq"),
        (ChangeKind.ERROR, "dv"),
    ]
    assert found[0].ratio == pytest.approx(2.1)
    assert found[1].ratio is None


def test_the_last_record_of_a_cell_counts() -> None:
    old, new = entry(CONFIG, [2.0] * 20), entry(CONFIG, [1.0] * 20)
    assert compare([old, new], [new]).changes == ()


def test_other_machines_and_versions_are_told_but_no_change() -> None:
    one = entry(CONFIG, [1.0] * 20)
    other = changed(one, environment={"python": "3.12", "packages": {"torch": "3", "numpy": "1"}})
    found = compare([one], [other])

    assert found.changes == ()
    assert found.environment == {"torch": ("2", "3"), "numpy": (None, "1")}


def test_facts_of_an_environment_may_be_of_any_kind() -> None:
    one = entry(CONFIG, [1.0] * 20)
    other = changed(one, environment={"python": None, "packages": 7, "variables": {"A": True}})
    found = compare([one], [other]).environment
    assert found == {"python": ("3.12", None), "torch": ("2", None), "A": (None, True)}


def test_a_ratio_that_no_number_holds_is_none() -> None:
    before, after = (entry(CONFIG, [1.0] * 20, max_rel_error={"dq": x}) for x in (5e-324, 1.0))
    (change,) = compare([before], [after]).changes
    assert (change.kind, change.ratio) == (ChangeKind.ERROR, None)


def test_an_empty_set_or_a_threshold_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="one of them is empty"):
        compare([], [entry(CONFIG, [1.0])])
    with pytest.raises(ValueError, match=r"threshold \(0\) must be positive"):
        compare(noisy(0), noisy(1), threshold=0)


def test_real_sweeps_differ_in_nothing_but_time_and_a_slowed_strategy_shows() -> None:
    configs = [
        replace(CONFIG, strategy=name, direction=direction)
        for name in ("ring", "ulysses")
        for direction in Direction
    ]
    both = list(measure_cells([*configs, *configs], Limits(warmup=2)))  # one team for both
    first, second = both[:4], both[4:]
    assert [entry.status for entry in first] == ["ok"] * 4
    # What the machine did meanwhile is not the test's business; a factor of ten would be.
    assert {c.kind for c in compare(first, second).changes} <= {
        ChangeKind.SLOWER,
        ChangeKind.FASTER,
    }
    assert compare(first, second, threshold=9).changes == ()

    def slowed(record: CellRecord) -> CellRecord:
        if record.config.strategy != "ulysses":
            return record
        samples, low, high = record.samples_s, record.p20_s, record.p80_s
        assert low is not None
        assert high is not None
        factor = 1.01 * max(1.2, high / low)  # out of the band, however noisy the machine is
        times = [factor * sample for sample in samples]
        return changed(record, samples_s=times, time_s=statistics.median(times))

    found = compare(first, [slowed(record) for record in first])
    assert {(c.strategy, c.kind) for c in found.changes} == {("ulysses", ChangeKind.SLOWER)}
    assert (len(found.changes), found.unchanged) == (2, 2)
