import pytest

from harness.cluster import cluster
from harness.problem import Direction, Dtype, Problem
from harness.residency import Program
from harness.simulated import trust
from harness.verify import verify
from patterns import make_pattern
from strategies import strategy


def ring(seqlen: int, dtype: Dtype = Dtype.BFLOAT16) -> Program:
    problem = Problem(
        pattern=make_pattern("full", seqlen),
        heads_q=8,
        heads_kv=8,
        head_dim=128,
        dtype=dtype,
        cp=8,
    )
    return verify(strategy("ring").plan(problem, Direction.FORWARD))


def test_a_datasheet_cluster_promises_nothing() -> None:
    said = trust(ring(8192), cluster(), "datasheet")
    assert said["calibration"] == "datasheet"
    assert said["inside_range"] is said["expected_error"] is said["calibration_id"] is None


@pytest.mark.parametrize(
    ("seqlen", "dtype", "inside"),
    [
        (8192, Dtype.BFLOAT16, True),
        (1024, Dtype.BFLOAT16, False),  # 128 tokens a rank: fewer than were measured
        (2**21, Dtype.BFLOAT16, False),
        (8192, Dtype.FLOAT32, False),
    ],
)
def test_a_calibrated_cluster_says_whether_it_was_measured_there(
    seqlen: int, dtype: Dtype, inside: bool
) -> None:
    machine = cluster("h800")
    said = trust(ring(seqlen, dtype), machine, machine.calibration)
    assert said["inside_range"] is inside
    assert ("OUTSIDE" in str(said["calibration"])) is not inside
    assert str(said["calibration_id"]).startswith("h800/")


def test_what_was_not_measured_has_no_expected_error() -> None:
    machine = cluster("h200")
    said = trust(ring(8192), machine, machine.calibration)
    assert said["expected_error"] is None
    assert "unknown" in str(said["calibration"])
