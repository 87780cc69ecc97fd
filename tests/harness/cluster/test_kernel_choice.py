"""Attention kernels by name, against published speeds."""

import pytest

from harness.cluster.calibration import calibration
from harness.cluster.kernel_choice import kernel_names
from harness.cluster.presets import CLUSTERS, cluster

HAMMING = calibration("h100-hamming")


def test_only_kernels_change_with_the_kernel() -> None:
    other = cluster("h100-hamming:kernel=flash-attn-3")
    assert other.fitted is not None
    assert other.fitted.kernels.name == "flash-attn-3"
    assert (other.fitted.links, other.fitted.effects) == (HAMMING.links, HAMMING.effects)
    assert other.name == "h100-hamming:kernel=flash-attn-3"
    assert other.fitted.id == f"{HAMMING.id}+flash-attn-3"
    assert HAMMING.validated != other.fitted.validated
    assert other.fitted.errors["far"] == HAMMING.errors["far"]
    assert cluster("h100").fitted == other.fitted
    assert cluster("h100-hamming:kernel=flash-attn-2").fitted == HAMMING


def test_every_cluster_that_was_measured_names_its_kernel() -> None:
    named = {name: c.fitted.kernels.name for name, c in CLUSTERS.items() if c.fitted is not None}
    assert named["local-cpu"] == "torch-cpu"
    assert named["h100"] == "flash-attn-3"
    assert {named[name] for name in ("h800", "a800", "a100", "h200")} == {"flash-attn-2"}
    assert kernel_names(HAMMING) == ("flash-attn-2", "cudnn", "flash-attn-3")
    assert kernel_names(calibration("a100")) == ("flash-attn-2",)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a800:kernel=cudnn", "not known for A800.*choose from flash-attn-2"),
        ("h100:kernel=", r"option \(kernel=\) is unknown"),
        ("h100:speed=9", r"option \(speed=9\) is unknown"),
        ("h100-8x8:kernel=cudnn", "needs a calibrated cluster"),
        ("h101:kernel=cudnn", r"cluster \(h101\) is unknown"),
    ],
)
def test_an_unknown_option_or_kernel_is_refused(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        cluster(name)
