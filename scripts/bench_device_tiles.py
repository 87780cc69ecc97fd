"""How well and how fast device tilings are found and proved: a table of instances, one a line.

    .venv/bin/python scripts/bench_device_tiles.py --group known
    .venv/bin/python scripts/bench_device_tiles.py --group proofs --match strided --json

Groups: `published`, the authors' instances with the diagonal fixed as in their code and free;
`known`, optima that other solvers proved; `proofs`, the six patterns and every block that a node
sees of them, both directions, on 8 devices; `large`, finer grids and more devices, where a plan
within the budget counts and the bound says what is open. Seconds are those of this process on one
core. Nothing is written.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from harness.base.json_fields import json_text
from harness.plan.problem import Direction
from patterns.table import Table
from strategies.ultraattn.blocks import grid_of_table, instance_of
from strategies.ultraattn.solver.assign import assign
from strategies.ultraattn.solver.instance import BACKWARD, FORWARD
from strategies.ultraattn.solver.published_instances import (
    SEED,
    SEED_TABLES,
    at_degree,
    logged,
    node_blocks,
)

FWD, BWD = Direction.FORWARD, Direction.BACKWARD
LARGE_S = 60.0
# Best values known: proved with SCIP, CP-SAT or HiGHS, or by counting. Pattern, P, N, direction.
KNOWN = [
    ("seed example", 4, 4, FWD, 4),
    ("causal", 4, 4, FWD, 5),
    ("full", 4, 4, FWD, 4),
    ("causal", 8, 4, FWD, 8),
    ("causal", 8, 8, FWD, 7),
    ("star", 8, 8, FWD, 6),
    ("streaming", 8, 8, FWD, 6),
    ("global_local band", 8, 8, FWD, 7),
    ("full", 8, 8, FWD, 8),
    ("full", 16, 16, FWD, 12),
    ("causal", 8, 8, BWD, 12),
    ("star", 8, 8, BWD, 8),
    ("streaming", 8, 8, BWD, 9),
]
# Best values found anywhere so far; most are not proved.
LARGE = [
    ("causal", 16, 8, 14),
    ("star", 16, 8, 12),
    ("streaming", 16, 8, 11),
    ("global_local", 16, 8, 9),
    ("causal", 16, 16, 12),
    ("star", 16, 16, 10),
    ("streaming", 16, 16, 9),
    ("global_local", 16, 16, 15),
    ("full", 16, 16, 12),
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One instance to solve; `target` is the value to reach, None where none is known."""

    group: str
    name: str
    table: Table
    devices: int
    direction: Direction = FWD
    fixed: bool = False
    target: int | None = None
    seconds: float | None = None  # of the budget; None = go for the proof

    @property
    def label(self) -> str:
        """Label of the instance, for the table."""
        return f"{self.name}{', diagonal fixed' if self.fixed else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The answer to a case."""

    group: str
    instance: str
    devices: int
    degree: int
    blocks: int
    direction: str
    target: int | None
    value: int
    bound: int
    gap: float
    volume: int
    status: str
    seconds: float


def cases() -> Iterator[Case]:
    """Yield every case, group by group."""
    for each in logged():
        for fixed in (True, False):
            yield Case(
                group="published",
                name=each.name,
                table=each.table,
                devices=8,
                fixed=fixed,
                target=each.value,
            )
    for name, degree, devices, direction, target in KNOWN:
        yield Case(
            group="known",
            name=name,
            table=_table(name, degree),
            devices=devices,
            direction=direction,
            target=target,
        )
    yield from _proofs()
    for name, degree, devices, target in LARGE:
        yield Case(
            group="large",
            name=name,
            table=_table(name, degree),
            devices=devices,
            target=target,
            seconds=LARGE_S,
        )


def _table(name: str, degree: int) -> Table:
    if name == "seed example":
        return SEED
    if name == "global_local band":  # what the first of two nodes sees
        return node_blocks(SEED_TABLES["global_local"], 2, degree)[0, 0]
    return at_degree(SEED_TABLES[name], degree)


def _proofs() -> Iterator[Case]:
    """Yield all tables of degree 8 that a single node or one of several sees, each once."""
    seen: list[Table] = []
    for pattern, raw in SEED_TABLES.items():
        found = {f"{pattern}": at_degree(raw, 8)} if 8 % len(raw) == 0 else {}
        for nodes in (2, 4, 8):
            for place, table in node_blocks(raw, nodes, 8).items():
                found[f"{pattern}, block {place} of {nodes} nodes"] = table
        for name, table in found.items():
            if any(np.array_equal(table, other) for other in seen):
                continue
            seen.append(table)
            for direction in (FWD, BWD):
                yield Case(group="proofs", name=name, table=table, devices=8, direction=direction)


def solve(case: Case, seed: int, seconds: float | None) -> Row:
    """Solve a case."""
    weights = FORWARD if case.direction is FWD else BACKWARD
    instance = instance_of(
        grid_of_table(case.table), case.devices, weights, fix_diagonal=case.fixed
    )
    if case.seconds is None:
        found = assign(instance, prove=True, seed=seed, seconds=seconds or 0.0)
    else:
        found = assign(instance, seconds=seconds or case.seconds, seed=seed)
    return Row(
        group=case.group,
        instance=case.label,
        devices=case.devices,
        degree=len(case.table),
        blocks=len(instance.blocks),
        direction=str(case.direction),
        target=case.target,
        value=found.value,
        bound=found.bound,
        gap=found.gap,
        volume=found.volume,
        status=str(found.status),
        seconds=round(found.seconds, 3),
    )


HEADER = (
    f"{'instance':62} {'N':>3} {'P':>3} {'blocks':>6} {'direction':9} {'known':>5} {'value':>5} "
    f"{'bound':>5} {'gap':>5} {'volume':>6} {'status':8} {'seconds':>7}"
)


def line(row: Row) -> str:
    """Return a row as a line under `HEADER`."""
    target = "-" if row.target is None else row.target
    return (
        f"{row.instance:62} {row.devices:>3} {row.degree:>3} {row.blocks:>6} {row.direction:9} "
        f"{target:>5} {row.value:>5} {row.bound:>5} {row.gap:>5.0%} {row.volume:>6} "
        f"{row.status:8} {row.seconds:>7.2f}"
    )


def summary(rows: list[Row]) -> str:
    """Return the summary of the rows of one group."""
    seconds = [row.seconds for row in rows]
    proved = sum(row.value == row.bound for row in rows)
    worse = [row.instance for row in rows if row.target is not None and row.value > row.target]
    text = (
        f"{proved} of {len(rows)} proved; median {statistics.median(seconds):.2f} s, "
        f"longest {max(seconds):.2f} s"
    )
    return text + (f"; worse than known: {', '.join(worse)}" if worse else "")


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 if a known value was missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    groups = list(dict.fromkeys(case.group for case in cases()))
    parser.add_argument("--group", choices=groups, action="append", help="default: all")
    parser.add_argument("--match", default="", help="only instances whose name contains this")
    parser.add_argument("--seconds", type=float, help="CPU seconds per instance")
    parser.add_argument("--seed", type=int, default=0, help="of the search and the solver")
    parser.add_argument("--json", action="store_true", help="print a list of rows")
    chosen = parser.parse_args(arguments)
    rows: list[Row] = []
    for group in chosen.group or groups:
        mine = [case for case in cases() if case.group == group and chosen.match in case.label]
        if not mine:
            continue
        if not chosen.json:
            print(f"{group}\n{HEADER}")
        solved = []
        for case in mine:
            solved.append(solve(case, chosen.seed, chosen.seconds))
            if not chosen.json:
                print(line(solved[-1]), flush=True)
        if not chosen.json:
            print(f"{summary(solved)}\n")
        rows += solved
    if chosen.json:
        print(json_text([asdict(row) for row in rows], indent=1))
    return int(any(row.target is not None and row.value > row.target for row in rows))


if __name__ == "__main__":
    sys.exit(main())
