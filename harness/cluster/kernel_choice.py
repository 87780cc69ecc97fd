"""Attention kernels by name: what stands in for the kernels that a calibration was fitted with.

A calibration's own kernels are those of the runs that it was fitted to. Frameworks have moved on,
links and hosts have not: `with_kernel` keeps these and takes the kernels of another library, from
one file each in `harness/cluster/kernels`, every parameter with its source.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from harness.base.files import read_text
from harness.base.toml_text import from_toml
from harness.cluster.calibration import Calibration, kernels_of, range_of
from harness.cluster.calibration_rules import judge_errors
from harness.cluster.validated import validated_of

KERNELS = Path(__file__).with_name("kernels")


def kernel_names(fitted: Calibration) -> tuple[str, ...]:
    """Names of the attention kernels that are known for a calibration's GPU, its own first."""
    others = (path.stem for path in sorted(KERNELS.glob("*.toml")))
    fit = (name for name in others if _read(name)["gpu"] == fitted.hardware.gpu)
    return tuple(dict.fromkeys((fitted.kernels.name, *fit)))


def with_kernel(fitted: Calibration, name: str) -> Calibration:
    """The same links, hosts and effects with another attention kernel.

    Errors of whole plans are those that were found with this kernel, not the calibration's.

    Raises:
        ValueError: No parameters of this kernel are known for this GPU; lists those that are.
    """
    if name == fitted.kernels.name:
        return fitted
    known = kernel_names(fitted)
    if name not in known:
        raise ValueError(
            f"kernel ({name}) is not known for {fitted.hardware.gpu}; choose from "
            f"{', '.join(known)}"
        )
    body = _read(name)
    links = {kind: fitted.errors[kind] for kind in ("near", "far") if kind in fitted.errors}
    judge_errors(body["errors"])
    return replace(
        fitted,
        id=f"{fitted.id}+{name}",
        kernels=kernels_of(body["kernels"]),
        range=range_of(body["range"]),
        errors={**links, **body["errors"]},
        validated=validated_of(body.get("validated", {}).get("classes", [])),
    )


@cache
def _read(name: str) -> Mapping[str, Any]:
    return from_toml(read_text(KERNELS / f"{name}.toml"))
