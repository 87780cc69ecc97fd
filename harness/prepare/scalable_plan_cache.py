"""Structures kept between runs, so that a sweep need not plan again what an earlier one planned.

They lie in a folder, by a hash of the problem and of the code that plans.
"""

import hashlib
from dataclasses import replace
from pathlib import Path

from harness.base.cache import keep, kept_by_this_code
from harness.cluster.calibration import Calibration
from harness.cluster.machine import Runtime
from harness.cluster.presets import cluster
from harness.planning.strategy import Context
from harness.prepare.planner_context import context_on
from harness.prepare.scalable_plan import Structure, searches, structure
from harness.prepare.scalable_plan_json import structure_from, text_of
from harness.proved.plans import proved
from harness.records.config import Config
from strategies import strategy


def structure_of(config: Config, fitted: Calibration, folder: Path | None) -> Structure:
    """Plan and prove a cell, or read what an earlier run made of it.

    Args:
        config: As `planned_at` gave it.
        fitted: Its cluster.
        folder: Where structures are kept; None keeps none.

    Raises:
        UnsupportedError: The strategy cannot do this problem.
    """
    name = f"{_key(config, fitted)}.json.z"
    kept = None if folder is None else kept_by_this_code(folder, name, structure_from)
    if kept is not None:
        return kept
    context = Context(gpus_per_node=fitted.hardware.gpus_per_node)
    if searches(config) and config.cluster is not None:
        machine = cluster(config.cluster)
        width = fitted.hardware.gpus_per_node
        context = context_on(replace(machine, gpus_per_node=width, fitted=fitted))
    program = proved(strategy(config.strategy), config.problem, config.direction, context)
    made = structure(program, fitted, eager=(config.runtime or Runtime.GRAPH).eager)
    if folder is not None:
        keep(folder, name, text_of(made))
    return made


def _key(config: Config, fitted: Calibration) -> str:
    """Of all that decides a structure: for most strategies not the cluster's speeds."""
    sheet = fitted.hardware
    place = (sheet.gpus_per_node, fitted.on_gpus, sheet.cores is None)
    plain = config if searches(config) else replace(config, cluster=None)
    return hashlib.sha256(repr((plain.hash, place)).encode()).hexdigest()[:24]
