import re
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cluster.calibration import FOLDER, calibration, dump, load
from harness.cluster.effects import ALL, Effect
from harness.cluster.link_model import Crowd, Curve, crowded_s
from harness.cluster.presets import CLUSTERS
from harness.plan.problem import Direction, Dtype, Problem
from harness.simulate.job_costs import HARNESS, TORCH, ULTRA, Pricer, launched_by
from harness.simulate.job_graph import skeleton
from harness.simulate.jobs import LaunchCounts, Need, NeedKind, Size, Skeleton
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import strategy

NAMES = sorted(path.stem for path in FOLDER.glob("*.toml"))
CURVE = Curve(
    latency_s=1e-6,
    small_bytes_per_s=1e9,
    switch_bytes=1000.0,
    large_latency_s=2e-6,
    bytes_per_s=2e9,
)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_cites_its_source_and_date(name: str) -> None:
    text = (FOLDER / f"{name}.toml").read_text()
    for line in text.splitlines():
        if "=" in line and not line.startswith(("id", "#")):
            assert "# Source: " in line
            assert "2026-" in line


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_back(name: str, tmp_path: Path) -> None:
    value = load(FOLDER / f"{name}.toml")
    path = tmp_path / "copy.toml"
    path.write_text(dump(value, {"": "Source: test, 2026-01-01"}))
    assert load(path) == value


def test_every_calibration_has_its_cluster() -> None:
    fitted = {c.fitted.id.split("/")[0] for c in CLUSTERS.values() if c.fitted is not None}
    assert fitted == set(NAMES)


def test_a_file_that_lacks_or_adds_a_parameter_is_refused(tmp_path: Path) -> None:
    text = (FOLDER / "h800.toml").read_text()
    path = tmp_path / "bad.toml"
    path.write_text(text.replace("launch_s", "lunch_s"))
    with pytest.raises(ValueError, match="lunch_s"):
        load(path)
    path.write_text(text.replace("[range]", "[rangers]"))
    with pytest.raises(ValueError, match="range"):
        load(path)


@pytest.mark.parametrize(
    ("parameter", "value", "rule"),
    [
        ("sms", "nan", "kernels.sms"),  # once searched without end
        ("sms", "-1", "kernels.sms"),
        ("nodes", '"8"', "hardware.nodes"),
        ("gpus_per_node", "true", "hardware.gpus_per_node"),
        ("device", '"tpu"', "cuda or cpu"),
        ("nodes", "1\ncores = 0", "hardware.cores"),
        ("nodes", "1\ncores = 2.0", "hardware.cores"),
        ("flops_per_s", "0", "hardware.flops_per_s"),
        ("launch_s", "-1e-6", "kernels.forward.launch_s"),
        ("causal", "inf", "kernels.forward.causal"),
        ("splits", "1", "true or false"),
        ("share", "0.0", "effects.near.share"),
        ("heads", "[]", "range.heads"),
        ("head_dims", "[128.5]", "range.head_dims"),
        ("min_tokens", "1000000", "range.max_tokens"),
        ("min_tokens", "1000000000", "range.min_tokens"),
        ("flops_per_s", "9" * 400, "hardware.flops_per_s"),  # too large for a float
        ("flops_per_s", "1e-300", "hardware.flops_per_s"),  # divided by
        ("held_sms", "1e308", "effects.near.held_sms"),
        ("gpus_per_node", "4000000000", "hardware.gpus_per_node"),
        ("share", "1e-300", "effects.near.share"),
        ("delta_passes", "1e300", "kernels.backward.delta_passes"),
        ("latency_s", "1e9", "links.near.latency_s"),
        ("gpu", '"\\u001b]0;x\\u0007"', "hardware.gpu"),
        ("id", '"\\u001b[2J"', "id"),
        ("heads", str([7] * 2000), "range.heads"),
        ("near", "1e9", "errors.near"),
        ("sms", "[" * 5000, "nested too deeply"),
        ("near", "nan", "errors.near"),
        ("id", "7", "id"),
    ],
)
def test_a_value_that_a_parameter_cannot_have_is_refused(
    tmp_path: Path, parameter: str, value: str, rule: str
) -> None:
    text = (FOLDER / "h800.toml").read_text()
    path = tmp_path / "bad.toml"
    path.write_text(
        re.sub(rf"(?m)^{parameter} = [^#\n]*", lambda _: f"{parameter} = {value} ", text, count=1)
    )
    with pytest.raises(ValueError, match=rf"bad\.toml.*{re.escape(rule)}"):
        load(path)


def test_a_table_that_is_a_value_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text('id = "mine"\nkernels = 3\nlinks = 4\neffects = 5\n')
    with pytest.raises(ValueError, match=r"bad\.toml"):
        load(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"bad\.toml"):
        load(path)


def test_beyond_the_fitted_range_is_marked() -> None:
    value = load(FOLDER / "h800.toml")
    assert value.inside((256, 131072), 32, 128)
    assert not value.inside((128,), 32, 128)
    assert not value.inside((262144,), 32, 128)
    assert not value.inside((1024,), 64, 128)
    assert not value.inside((1024,), 32, 64)


def test_a_message_below_and_above_the_switch() -> None:
    assert CURVE.seconds(999) == pytest.approx(1e-6 + 999e-9)
    assert CURVE.seconds(1000) == pytest.approx(2e-6 + 0.5e-6)


def test_a_crowd_shares_the_bandwidth_and_shakes_hands() -> None:
    crowd = Crowd(handshake_s=3e-6, share=0.5, share_beside=1.0, held_sms=0.0)
    assert crowded_s(CURVE, crowd, 1000) == pytest.approx(2e-6 + 3e-6 + 1e-6)


@pytest.mark.parametrize("field", ["small_bytes_per_s", "bytes_per_s"])
def test_a_link_without_bandwidth_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match="positive"):
        replace(CURVE, **{field: 0.0})


def shape(text: str, pattern: str, cp: int = 8) -> Skeleton:
    problem = Problem(
        pattern=make_pattern(pattern, cp * 1024),
        heads_q=1,
        heads_kv=1,
        head_dim=128,
        dtype=Dtype.BFLOAT16,
        cp=cp,
    )
    return skeleton(verify(strategy(text).plan(problem, Direction.FORWARD)), 8, eager=True)


def pricer(**changes: object) -> Pricer:
    base = Pricer(
        calibration=calibration("h800"),
        convention=HARNESS,
        direction=Direction.FORWARD,
        scale_q=4.0,
        scale_kv=4.0,
        heads=32,
    )
    return replace(base, **changes)


@pytest.mark.parametrize("effect", sorted(ALL))
def test_every_effect_can_be_switched_off_and_then_adds_nothing_or_saves(effect: Effect) -> None:
    made = shape("ring", "causal")
    # Evened out, the first rank has one long kernel, which its transfers then wait for and meet.
    apart = {Effect.BLOCKING, Effect.INTERFERENCE}
    base = ALL - apart if effect is Effect.IMBALANCE else ALL
    on, off = (
        pricer(convention=TORCH, effects=effects).seconds_of(made)
        for effects in (base, base - {effect})
    )
    assert off <= on * 1.001
    nothing = pricer(convention=TORCH, effects=frozenset()).seconds_of(made)
    assert nothing < on


def test_a_graph_pays_no_host_and_a_torch_ring_does() -> None:
    made = shape("ring", "full")
    graph, eager = (pricer(convention=c, scale_q=0.5, scale_kv=0.5) for c in (HARNESS, TORCH))
    assert eager.seconds_of(made) > 2 * graph.seconds_of(made)


def test_without_kernels_or_transfers_only_the_other_is_left() -> None:
    made = shape("grid:rows=8", "full")
    both = pricer(convention=ULTRA).seconds_of(made)
    moves = pricer(convention=ULTRA, compute=False).seconds_of(made)
    works = pricer(convention=ULTRA, transfers=False).seconds_of(made)
    assert max(moves, works) < both
    start = pricer().calibration.effects.start_s
    (call,) = {call for part in made.parts for call in part.need.calls}
    kernels = 8 * pricer().call_s(pricer().calibration.kernels, call, 0)
    assert works == pytest.approx(kernels + start)


def test_partial_results_travel_in_the_precision_of_the_convention() -> None:
    made = shape("grid:rows=1", "full")
    need = next(
        part.need
        for part in made.parts
        if part.need.kind is NeedKind.TRANSFER and part.need.size.result_q
    )
    tokens = 4 * 1024 * 32
    assert pricer(convention=ULTRA).wire_bytes(need.size) == tokens * 128 * 2
    assert pricer(convention=HARNESS).wire_bytes(need.size) == tokens * (128 * 4 + 4)


def test_eager_merges_move_what_their_operations_do() -> None:
    size = Size(result_q=128 * 1024)
    moved = 4 * 1024 * 128 * 32 * 4
    for kind, direction, passes in (
        ({}, Direction.FORWARD, 6.5),
        ({"sliced": True}, Direction.FORWARD, 8.5),
        ({}, Direction.BACKWARD, 2.5),
        ({"sliced": True}, Direction.BACKWARD, 2.5),
        ({"again": True}, Direction.BACKWARD, 6.5),
    ):
        prices = pricer(convention=TORCH, direction=direction)
        fitted = prices.calibration.effects.eager.passes / 6.5
        took = prices.fold_s(Need(NeedKind.TILE, size=size, **kind))
        bandwidth = prices.calibration.kernels.memory_bandwidth_bytes_per_s
        assert took == pytest.approx(passes * fitted * moved / bandwidth)


def test_a_runtime_that_sends_one_tensor_and_merges_nothing_launches_less() -> None:
    launched = LaunchCounts(calls=3, folds=2, merges=1, moves=4, slices=2, messages=8)
    assert launched_by(launched, TORCH)[2:] == (3, 4, 0, 0, 2, 8)
    whole = replace(TORCH, merges=False, apart=False)
    assert launched_by(launched, whole)[2:] == (1, 4, 0, 0, 0, 4)
