"""Structures kept between runs, so that a sweep need not plan again what an earlier one planned.

They lie in a folder, by a hash of the problem and of the code that plans.
"""

import hashlib
from dataclasses import replace
from pathlib import Path

from harness.caching import keep, kept_by_this_code
from harness.calibration import Calibration
from harness.cluster import Runtime, cluster
from harness.config import Config
from harness.contexts import context_on
from harness.strategy import Context
from harness.structure import Structure, searches, structure
from harness.structure_text import structure_from, text_of
from harness.verify import verify
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
        context = context_on(cluster(config.cluster))
    plan = strategy(config.strategy).plan(config.problem, config.direction, context)
    made = structure(verify(plan), fitted, eager=config.runtime is Runtime.EAGER)
    if folder is not None:
        keep(folder, name, text_of(made))
    return made


def _key(config: Config, fitted: Calibration) -> str:
    """Of all that decides a structure: for most strategies not the cluster's speeds."""
    sheet = fitted.hardware
    place = (sheet.gpus_per_node, fitted.on_gpus, sheet.cores is None)
    plain = config if searches(config) else replace(config, cluster=None)
    return hashlib.sha256(repr((plain.hash, place)).encode()).hexdigest()[:24]
