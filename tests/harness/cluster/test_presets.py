"""Clusters: presets, where ranks sit, which link joins them, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cluster import presets as module
from harness.cluster.machine import Link, LinkClass
from harness.cluster.presets import CLUSTERS, DEFAULT_CLUSTER, H100_SXM, cluster, h100, require
from harness.errors import UnsupportedError
from harness.plan.problem import Direction, Dtype
from harness.plan.tasks import Memory, Place


def test_the_default_is_eight_nodes_of_eight_gpus() -> None:
    c = cluster()

    assert (c.name, next(iter(CLUSTERS)), c.gpus) == (DEFAULT_CLUSTER, "h100-hamming", 64)
    assert (c.nodes, c.gpus_per_node, cluster("h100-1x8").gpus) == (8, 8, 8)


def test_presets_have_the_datasheet_numbers() -> None:
    c = cluster("h100-8x8")

    assert c.nvlink.bandwidth_bytes_per_s == 450e9
    assert c.nic.bandwidth_bytes_per_s * 8 == 400e9
    assert c.gpu.peak_flops_per_s(Dtype.BFLOAT16) == pytest.approx(989e12, rel=1e-3)
    assert c.gpu.attention_flops_per_s(Dtype.BFLOAT16, Direction.FORWARD) == 989.4e12 * 0.42
    assert c.gpu.attention_flops_per_s(Dtype.FLOAT32, Direction.BACKWARD) == 66.9e12 * 0.35
    assert c.gpu.peak_flops_per_s(Dtype.FLOAT64) == 66.9e12
    assert "not calibrated" in c.calibration


def test_an_unknown_name_lists_the_choices() -> None:
    with pytest.raises(ValueError, match=r"cluster \(b200\) is unknown .*h100-8x8, h100-1x8"):
        cluster("b200")


def test_ranks_fill_nodes_in_order() -> None:
    c = replace(h100(2), gpus_per_node=4)

    assert [c.node(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("src", "dst", "kind"),
    [
        (Place(0), Place(0), LinkClass.LOCAL),
        (Place(0), Place(7), LinkClass.NVLINK),
        (Place(7), Place(8), LinkClass.NIC),
        (Place(3), Place(3, Memory.HOST), LinkClass.HOST),
        (Place(3, Memory.HOST), Place(3), LinkClass.HOST),
    ],
)
def test_the_link_follows_from_the_places(src: Place, dst: Place, kind: LinkClass) -> None:
    assert kind is cluster().link_class(src, dst)


def test_another_ranks_host_memory_is_out_of_reach() -> None:
    with pytest.raises(UnsupportedError, match="must not cross two links"):
        cluster().link_class(Place(0), Place(1, Memory.HOST))


def test_more_ranks_than_gpus_are_refused_with_a_way_out() -> None:
    require(cluster("h100-1x8"), 8)
    with pytest.raises(UnsupportedError, match=r"cp \(9\) must not exceed its 8 GPUs") as caught:
        require(cluster("h100-1x8"), 9)

    assert caught.value.nearest[0] == "--cluster h100-hamming"
    assert "--cluster dgx-h100" not in caught.value.nearest
    assert caught.value.nearest[-1] == "cp 8"


def test_a_message_takes_its_latency_and_its_bytes() -> None:
    link = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-6)

    assert link.seconds(1000) == pytest.approx(2e-6, rel=1e-12)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: replace(H100_SXM, efficiency_forward=0.0),
        lambda: replace(H100_SXM, efficiency_linear=1.1),
        lambda: replace(H100_SXM, memory_bandwidth_bytes_per_s=0),
        lambda: Link(bandwidth_bytes_per_s=0, latency_s=0),
        lambda: Link(bandwidth_bytes_per_s=1, latency_s=-1),
        lambda: replace(h100(1), nodes=0),
        lambda: replace(h100(1), gpus_per_node=0),
        lambda: replace(h100(1), host_launch_s=-1),
    ],
)
def test_impossible_numbers_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="must"):
        wrong()


def test_every_number_of_a_preset_has_its_source_on_its_line() -> None:
    text = Path(module.__file__).read_text(encoding="utf-8")
    presets = text[text.index("H100_SXM = Gpu(") : text.index("CLUSTERS:")]
    numbers = [
        line
        for line in presets.splitlines()
        if (value := line.partition("=")[2].strip()) and value[0].isdigit()
    ]

    assert len(numbers) >= 16
    assert [line for line in numbers if not ("Source:" in line or "Assumed" in line)] == []
