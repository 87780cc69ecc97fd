"""Errors of classes of plans, found on measured runs, and written into their cluster's file."""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from harness.cluster.calibration import FOLDER, validated_text
from harness.cluster.kernel_choice import KERNELS
from harness.cluster.validated import FEWEST_RUNS, PlanClass, ValidatedClass
from harness.reproduce.accuracy import Predicted, run_errors
from harness.reproduce.case import Case
from harness.reproduce.published_runs import class_of_run, fitted_of, next_to_none, predict_run

_SECTIONS = re.compile(r"\n*^\[validated\].*\Z", re.MULTILINE | re.DOTALL)


def validated_classes(pairs: Predicted) -> Mapping[str, tuple[ValidatedClass, ...]]:
    """Errors by cluster and class, of runs whose plan is known and that were not fitted."""
    groups: defaultdict[str, defaultdict[PlanClass, list[tuple[Case, float]]]]
    groups = defaultdict(lambda: defaultdict(list))
    for case, seconds in pairs:
        if case.mode != "normal" or not case.known:
            continue  # a part of a run, or another plan than the one that is predicted
        fixed_s = predict_run(next_to_none(case), fitted_of(case))
        groups[case.cluster][class_of_run(case, seconds, fixed_s)].append((case, seconds))
    return {
        name: tuple(
            _errors(kind, runs)
            for kind, runs in sorted(classes.items(), key=lambda item: _order(item[0]))
            if len(runs) >= FEWEST_RUNS
        )
        for name, classes in groups.items()
    }


def _order(kind: PlanClass) -> tuple[str, int, str, str, tuple[str, ...]]:
    return kind.runtime, kind.nodes, kind.direction, kind.regime, kind.transfers


def _errors(kind: PlanClass, runs: Predicted) -> ValidatedClass:
    found = run_errors(runs)
    return ValidatedClass(
        runtime=kind.runtime,
        direction=kind.direction,
        nodes=kind.nodes,
        transfers=kind.transfers,
        regime=kind.regime,
        runs=found.n,
        mean=found.mape,
        p90=found.p90,
    )


def write_validated(
    cluster_name: str, kernel: str, validated: tuple[ValidatedClass, ...], source: str
) -> Path:
    """Put classes in the place of those in the file of a cluster, or of a kernel that stands in."""
    own = FOLDER / f"{cluster_name}.toml"
    path = own if own.exists() else KERNELS / f"{kernel}.toml"
    text = _SECTIONS.sub("", path.read_text(encoding="utf-8")).rstrip("\n")
    path.write_text(f"{text}\n{validated_text(validated, source)}\n", encoding="utf-8")
    return path
