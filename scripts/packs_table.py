"""Packed documents under strategies made for them: predicted time and bound over ten packs.

    .venv/bin/python scripts/packs_table.py --cp 8 --seqlen 128k --cells packs.jsonl
    .venv/bin/python scripts/packs_table.py --table packs.jsonl > results/packs.md

The first command plans, proves and simulates both directions of every pack and appends one line per
pack and strategy to a file; cells that are there are left out, so a run that was stopped goes on.
The second makes the tables.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from harness.base.json_fields import json_text
from harness.cluster.machine import Cluster
from harness.cluster.presets import cluster
from harness.errors import UnsupportedError
from harness.plan.imbalance import imbalance_total
from harness.plan.problem import Direction, Problem
from harness.plan.sizes import traffic
from harness.prepare.planner_context import context_on
from harness.records.defaults import usual
from harness.simulate.bounds import any_plan_bound, most_owned
from harness.simulate.simulator import simulate
from harness.terminal.arguments import count, length, listed
from harness.verify.proof import verify
from strategies import strategy

CLUSTER = "h100-hamming"
OURS, RULE = "dynamic", "dynamic:rule=megatron"
NAMES = (
    OURS,
    RULE,
    "dynamic:rule=megatron,inner=ring",
    "allgather:placement=balanced",
    "allgather:placement=documents",
    "hypergraph",
)
PRESETS = ("pile_arxiv", "megatron")
HEADS = (
    "strategy",
    "packs",
    "mean ms",
    "bound ms",
    "over bound",
    "best on",
    "imbalance",
    "GiB moved",
    "tokens",
)

Cell = dict[str, Any]


def problem_of(preset: str, seed: int, cp: int, seqlen: int) -> Problem:
    """A pack, 32/8 heads of 128, bfloat16."""
    return usual(f"documents:preset={preset},seed={seed}", cp, seqlen, 32, 8)


def simulated(problem: Problem, name: str, machine: Cluster) -> Cell:
    """Plan, prove and simulate both directions; what is refused has the reason."""
    context = context_on(machine)
    try:
        plans = [strategy(name).plan(problem, way, context) for way in Direction]
    except UnsupportedError as error:
        return {"refused": str(error)}
    seconds = [simulate(verify(plan), machine).makespan_s for plan in plans]
    owned = most_owned(plans[0])
    bounds = [any_plan_bound(problem, way, machine, owned).bound_s for way in Direction]
    return {
        "seconds": sum(seconds),
        "bound_s": sum(bounds),
        "imbalance": imbalance_total(plans[0]),
        "received_bytes": sum(sum(traffic(plan)[1]) for plan in plans),
        "most_tokens": owned[0],
    }


def run(args: argparse.Namespace) -> None:
    """Append the cells that the file lacks."""
    known = {cell["key"] for cell in cells(args.cells)} if args.cells.exists() else set()
    machine = cluster(CLUSTER)
    for seed in range(args.packs):
        for preset in args.presets:
            problem = problem_of(preset, seed, args.cp, args.seqlen)
            for name in args.strategies:
                key = f"{preset} {seed} {args.cp} {args.seqlen} {name}"
                if key in known:
                    continue
                found = simulated(problem, name, machine)
                named = {"preset": preset, "seed": seed, "cp": args.cp, "seqlen": args.seqlen}
                line = json_text({"key": key, **named, "strategy": name, **found}, compact=True)
                with args.cells.open("a") as file:
                    file.write(line + "\n")
                print(line, file=sys.stderr, flush=True)


def cells(path: Path) -> Iterator[Cell]:
    """Yield the cells of a file."""
    for line in path.read_text().splitlines():
        yield json.loads(line)


def tables(found: Sequence[Cell]) -> Iterator[str]:
    """Yield the lines of all tables."""
    groups: dict[tuple[int, int, str], dict[str, dict[int, Cell]]] = {}
    for cell in found:
        group = groups.setdefault((cell["cp"], cell["seqlen"], cell["preset"]), {})
        group.setdefault(cell["strategy"], {})[cell["seed"]] = cell
    for (cp, seqlen, preset), rows in sorted(groups.items()):
        yield f"\n## cp={cp} S={seqlen // 1024}k documents:preset={preset}\n"
        yield f"| {' | '.join(HEADS)} |"
        yield "|---" * len(HEADS) + "|"
        fastest = winners(rows)
        for name, packs in rows.items():
            yield row(name, packs, fastest, seqlen / cp)
        yield from verdict(rows)


def winners(rows: Mapping[str, Mapping[int, Cell]]) -> dict[int, str]:
    """Return the fastest strategy of each pack."""
    seeds = {seed for packs in rows.values() for seed in packs}
    found = {}
    for seed in seeds:
        timed = {n: p[seed]["seconds"] for n, p in rows.items() if "seconds" in p.get(seed, {})}
        found[seed] = min(timed, key=lambda name: timed[name])
    return found


def row(name: str, packs: Mapping[int, Cell], fastest: Mapping[int, str], even: float) -> str:
    """One strategy over its packs: means, and the spread of the ratio to the bound."""
    timed = [cell for cell in packs.values() if "seconds" in cell]
    if not timed:
        reason = next(iter(packs.values()))["refused"].replace("|", "/")
        return f"| `{name}` | 0 of {len(packs)} | refused: {reason} | | | | | | |"
    over = [cell["seconds"] / cell["bound_s"] for cell in timed]
    best = sum(winner == name for winner in fastest.values())
    return (
        f"| `{name}` | {len(timed)} of {len(packs)} "
        f"| {1e3 * fmean(cell['seconds'] for cell in timed):.2f} "
        f"| {1e3 * fmean(cell['bound_s'] for cell in timed):.2f} "
        f"| {fmean(over):.2f}× ({min(over):.2f} to {max(over):.2f}) | {best} "
        f"| {max(cell['imbalance'] for cell in timed):.2f} "
        f"| {fmean(cell['received_bytes'] for cell in timed) / 2**30:.2f} "
        f"| {max(cell['most_tokens'] for cell in timed) / even:.2f} |"
    )


def verdict(rows: Mapping[str, Mapping[int, Cell]]) -> Iterator[str]:
    """Say on how many packs the solved groups are behind Megatron's."""
    if OURS not in rows or RULE not in rows:
        return
    both = rows[OURS].keys() & rows[RULE].keys()
    pairs = [(rows[OURS][s].get("seconds"), rows[RULE][s].get("seconds")) for s in sorted(both)]
    ratios = [rule / ours for ours, rule in pairs if ours and rule]
    behind = sum(ratio < 1 for ratio in ratios)
    yield (
        f"\n`{OURS}` is behind `{RULE}` on {behind} of {len(ratios)} packs; it is faster by "
        f"{fmean(ratios):.2f}× ({min(ratios):.2f} to {max(ratios):.2f})."
    )


def main() -> None:
    """Run cells, or print tables of those that ran."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cp", type=count, default=8, help="degree")
    parser.add_argument("--seqlen", type=length, default=131072, help="tokens of a pack")
    parser.add_argument("--packs", type=count, default=10, help="packs of each distribution")
    parser.add_argument("--presets", type=listed(str), default=PRESETS, help="distributions")
    parser.add_argument("--strategies", type=listed(str), default=NAMES, help="names")
    parser.add_argument("--cells", type=Path, default=Path("packs.jsonl"), help="file of cells")
    parser.add_argument("--table", type=Path, help="print the tables of such a file instead")
    args = parser.parse_args()
    if args.table is None:
        run(args)
    else:
        print("\n".join(tables(list(cells(args.table)))))


if __name__ == "__main__":
    main()
