#!/usr/bin/env python
"""Compare predictions with measured runs, set by set.

.venv/bin/python scripts/validate_predictor.py --data DIR [--json | --markdown] [--plot FILE]
.venv/bin/python scripts/validate_predictor.py --data DIR --holdout
.venv/bin/python scripts/validate_predictor.py --data DIR --write-errors
.venv/bin/python scripts/validate_predictor.py --data DIR --ablation

DIR holds tables of measured runs (see harness/reproduce/measured_runs.py); every *.csv with their
columns is read. Rows whose strategy exists here are predicted; others are counted with their
reason. Times under 0.3 ms of the UltraAttn harness are left out: they repeat within 14 %.

Errors are those of rows whose plan is known (`same_plan`). Where ties or a searched tiling leave it
open, the row compares the time of our plan, made for its own size, with the time of theirs: it has
a set of its own. A search gets 0.2 CPU seconds, so these rows depend a little on the machine.

--holdout reports on the half of the shapes that was not fitted. --write-errors puts the errors of
each class of plans on that half into the clusters' files, where `sweep` and `simulate` find them.
--ablation switches effects off one by one, on at most --most rows of each set.
"""

import argparse
import sys
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from harness.base.json_fields import json_text
from harness.cluster.effects import ALL, Effect
from harness.cluster.presets import cluster
from harness.fit.cluster import run_halves
from harness.fit.tables import Row, read
from harness.fit.validated import validated_classes, write_validated
from harness.reproduce.accuracy import (
    LONG,
    Predicted,
    Ranking,
    SetKey,
    ranking,
    rankings,
    run_errors,
    set_key,
    sets_of,
    strategy_choices,
)
from harness.reproduce.case import CLUSTER_OF, Case
from harness.reproduce.measured_runs import cases_of, lacking
from harness.reproduce.published_runs import predict_run

_BATCH = 256
_NEAR_BEST = 1.03  # of the best time: as good as the best
_ABLATED = 60  # rows of a set, unless --most says more


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of measured tables")
    parser.add_argument("--json", action="store_true", help="a list of objects, fractions")
    parser.add_argument("--markdown", action="store_true", help="the tables of docs/predictor.md")
    parser.add_argument("--plot", type=Path, help="write a scatter plot")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--without", choices=sorted(ALL), action="append", default=[])
    parser.add_argument("--noisy", action="store_true", help="keep UltraAttn times under 0.3 ms")
    parser.add_argument("--holdout", action="store_true", help="only shapes that were not fitted")
    parser.add_argument(
        "--write-errors", action="store_true", help="into harness/cluster/calibrations"
    )
    parser.add_argument("--ablation", action="store_true", help="effects off, one by one")
    parser.add_argument("--most", type=int, default=0, help="rows of a set; 0 is all")
    args = parser.parse_args()
    try:
        cases, skipped = load(args.data, noisy=args.noisy)
    except ValueError as error:
        parser.error(str(error))
    if args.holdout:
        cases = run_halves(cases)[1]
    most = args.most or (_ABLATED if args.ablation else len(cases))
    cases = thinned(cases, most)
    if args.ablation:
        ablation(cases, args.jobs)
        return
    effects = ALL - {Effect(name) for name in args.without}
    found = predict_all(cases, effects, args.jobs)
    skipped.update(reason for reason in found if isinstance(reason, str))
    both = [(c, p) for c, p in zip(cases, found, strict=True) if isinstance(p, float)]
    cases, predicted = [c for c, _ in both], [p for _, p in both]
    if args.write_errors:
        write_errors(both)
    rows, found_best = summary(both), strategy_choices(both)
    if args.json:
        whole = ranking(found_best)
        body = {
            "sets": rows,
            "regret": {"problems": whole.problems, "mean": whole.mean, "worst": whole.worst},
            "pairs": {"compared": whole.compared, "reversed": whole.reversed},
        }
        sys.stdout.write(json_text(body, indent=1) + "\n")
    elif args.markdown:
        places = rankings(found_best, lambda c: f"{c.gpu} {c.kernel}, {c.nodes} nodes")
        show_ranking({**places, "all": ranking(found_best)})
        show_markdown(rows)
        show_rings(cases, predicted)
    else:
        show(rows)
    if not args.json:
        show_best(cases, predicted)
    for reason, count in skipped.most_common():
        print(f"skipped {count:>6}: {reason}", file=sys.stderr)
    if args.plot:
        plot(cases, predicted, args.plot)


def thinned(cases: list[Case], most: int) -> list[Case]:
    """Keep at most so many of each set, evenly spread over its sizes."""
    groups: dict[SetKey, list[Case]] = defaultdict(list)
    for case in cases:
        groups[set_key(case)].append(case)
    kept = []
    for _, members in sorted(groups.items()):
        members.sort(key=lambda c: (c.heads, c.seqlen_q, c.seqlen_kv, c.rows))
        kept += members[:: -(-len(members) // most)]
    return kept


def write_errors(pairs: Predicted) -> None:
    """Write the errors of every class, on shapes not fitted, into its cluster's file."""
    apart = {id(case) for case in run_halves([case for case, _ in pairs])[1]}
    # No parameter is fitted to charts, nor to pairs of times.
    kept = [(case, s) for case, s in pairs if case.text or id(case) in apart]
    today = datetime.now(tz=UTC).date().isoformat()
    source = f"Source: validate_predictor --write-errors, runs not fitted, {today}"
    kernels = {name: kernel for (_, kernel), name in CLUSTER_OF.items()}
    for name, found in validated_classes(kept).items():
        path = write_validated(name, kernels[name], found, source)
        print(f"{path.name}: {len(found)} classes", file=sys.stderr)


def ablation(cases: list[Case], jobs: int) -> None:
    """Print the error of groups of sets with one effect off at a time, as Markdown."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, case in enumerate(cases):
        kind = "rings" if case.is_eager else "plans"
        nodes = "1 node" if case.nodes == 1 else "nodes"
        if case.mode == "normal":
            groups[f"{case.gpu} {kind}, {nodes}"].append(index)
    print("| effect off | " + " | ".join(f"{k} (n={len(v)})" for k, v in groups.items()) + " |")
    print("|" + "---|" * (len(groups) + 1))
    for effect in (None, *sorted(ALL)):
        effects = ALL if effect is None else ALL - {effect}
        found = predict_all(cases, effects, jobs)
        cells = []
        for members in groups.values():
            both = [(found[i], cases[i].measured_s) for i in members]
            gaps = np.array([p / m - 1 for p, m in both if isinstance(p, float)])
            cells.append(f"{np.abs(gaps).mean():.1%} ({gaps.mean():+.1%})")
        print(f"| {effect.value if effect else 'none'} | " + " | ".join(cells) + " |", flush=True)


def load(folder: Path, *, noisy: bool) -> tuple[list[Case], Counter[str]]:
    """Read every table of measured runs in a folder; count what is skipped by reason.

    Raises:
        ValueError: The folder has no such table.
    """
    cases: list[Case] = []
    skipped: Counter[str] = Counter()
    other = []  # why a file is no such table
    paths = sorted(folder.glob("*.csv"))
    for path in paths:
        rows: list[Row] = read(folder, path.name)
        absent = lacking(set(rows[0])) if rows else []
        if absent or not rows:
            why = f"lacks the columns {', '.join(absent)}" if absent else "has no rows"
            other.append(f"{path.name} {why}")
            continue
        for case in (case for row in rows for case in cases_of(row)):
            if isinstance(case, str):
                skipped[case] += 1
            elif case.noisy and not noisy:
                skipped["UltraAttn times under 0.3 ms are noise"] += 1
            else:
                cases.append(case)
    if len(other) == len(paths):
        found = "; ".join(other) or ("it holds no *.csv" if folder.is_dir() else "it is no folder")
        raise ValueError(
            f"--data ({folder}) must hold tables of measured runs, *.csv with the columns of "
            f"measured_dist_attn.csv or measured_bsa_h100.csv, but {found}"
        )
    return cases, skipped


def predict_all(cases: list[Case], effects: frozenset[Effect], jobs: int) -> list[float | str]:
    """Predict, dearest plans first, batches of like plans together so that plans are made once.

    Returns:
        Seconds; or why a row cannot be predicted.
    """

    def like(index: int) -> tuple[object, ...]:
        c = cases[index]
        return -c.cp, c.strategy, c.pattern, c.levels, c.direction, c.rows, c.gpu, c.heads

    order = sorted(range(len(cases)), key=like)
    batches = [order[at : at + _BATCH] for at in range(0, len(order), _BATCH)]
    batches = [part for b in batches for part in ([b[::2], b[1::2]] if cases[b[0]].cp > 8 else [b])]
    work = [[cases[i] for i in batch] for batch in batches]
    found: list[float | str] = [0.0] * len(cases)
    with ProcessPoolExecutor(jobs) as pool:
        for batch, times in zip(
            batches, pool.map(_batch, work, [effects] * len(work)), strict=True
        ):
            for index, seconds in zip(batch, times, strict=True):
                found[index] = seconds
    return found


def _batch(cases: list[Case], effects: frozenset[Effect]) -> list[float | str]:
    known: dict[Case, float | str] = {}  # repeated runs are predicted once
    found = []
    for case in cases:
        key = replace(case, measured_s=1.0, author_s=None)
        if key not in known:
            known[key] = _one(case, effects)
        found.append(known[key])
    return found


def _one(case: Case, effects: frozenset[Effect]) -> float | str:
    try:
        fitted = cluster(case.cluster).fitted
        assert fitted is not None  # every one that predicts runs is
        return predict_run(case, fitted, effects)
    except Exception as error:  # the boundary of the row: a shape that no plan here fits
        return f"it cannot be planned: {type(error).__name__}: {error}"


def summary(pairs: Predicted) -> list[dict[str, object]]:
    """One object per set: GPU, kernel, nodes, pattern, direction, strategy."""
    rows: list[dict[str, object]] = []
    for (gpu, kernel, nodes, pattern, direction, strategy), members in sets_of(pairs).items():
        gap = np.array([seconds / case.measured_s - 1 for case, seconds in members])
        logs = np.log([case.measured_s for case, _ in members])
        total = float(((logs - logs.mean()) ** 2).sum())
        authors = [(c.author_s, c.measured_s) for c, _ in members if c.author_s is not None]
        errors = run_errors(members)
        long = [pair for pair in members if pair[0].seqlen_q >= LONG]
        of_long = run_errors(long) if long else None
        rows.append(
            {
                "gpu": gpu,
                "kernel": kernel,
                "nodes": nodes,
                "pattern": pattern,
                "direction": direction,
                "strategy": strategy,
                "same_plan": all(case.known for case, _ in members),
                "n": errors.n,
                "mape": errors.mape,
                "median_ape": errors.p50,
                "p50": errors.p50,
                "p90": errors.p90,
                "worst": errors.worst,
                "signed": errors.signed,
                "long_n": len(long),
                "long_mape": of_long.mape if of_long else None,
                "long_p90": of_long.p90 if of_long else None,
                "r2_log": 1 - float((np.log1p(gap) ** 2).sum()) / total if total else None,
                "over_30": float((np.abs(gap) > 0.3).mean()),
                "over_50": float((np.abs(gap) > 0.5).mean()),
                "author_mape": float(np.mean([abs(a / m - 1) for a, m in authors]))
                if authors
                else None,
            }
        )
    return rows


def show(rows: list[dict[str, object]]) -> None:
    """Print the table; sets of other plans than ours come last."""
    print(
        f"{'gpu':<5} {'kernel':<12} {'nodes':>5} {'pattern':<13} {'dir':<4} {'strategy':<16} "
        f"{'n':>6} {'mape':>7} {'p50':>7} {'p90':>7} {'worst':>7} {'signed':>7} {'author':>7}"
    )
    for same in (True, False):
        mine = [row for row in rows if row["same_plan"] is same]
        if mine and not same:
            print("\nour plan's time against that of theirs, whose ties or tilings are unknown:")
        for row in mine:
            cells = " ".join(f"{row[name]:>7.1%}" for name in ("mape", "p50", "p90", "worst"))
            author = "-" if row["author_mape"] is None else f"{row['author_mape']:.1%}"
            print(
                f"{row['gpu']:<5} {row['kernel']:<12} {row['nodes']:>5} {row['pattern']:<13} "
                f"{row['direction']:<4} {row['strategy']:<16} {row['n']:>6} {cells} "
                f"{row['signed']:>+7.1%} {author:>7}"
            )


def show_markdown(rows: list[dict[str, object]]) -> None:
    """Print the tables as Markdown: rows of known plans, then our plans against theirs."""
    for same in (True, False):
        print(
            "\n| GPU, kernel | nodes | pattern | direction | strategy | n | mean | p50 | p90 | ",
            end="",
        )
        print("worst | signed | S ≥ 64K: mean | p90 | author |\n|" + "---|" * 14)
        for row in rows:
            if row["same_plan"] is not same:
                continue
            names = [str(row[k]) for k in ("nodes", "pattern", "direction", "strategy", "n")]
            sizes = [_percent(row[k]) for k in ("mape", "p50", "p90", "worst")]
            rest = [_percent(row[k]) for k in ("long_mape", "long_p90", "author_mape")]
            cells = [f"{row['gpu']} {row['kernel']}", *names, *sizes, f"{row['signed']:+.1%}"]
            print(f"| {' | '.join([*cells, *rest])} |")


def _percent(share: object) -> str:
    return f"{share:.1%}" if isinstance(share, float) else "–"


def show_ranking(groups: dict[str, Ranking]) -> None:
    """Print as Markdown how well strategies are ranked."""
    print("| where | problems | regret, mean | worst | best one right | pairs | reversed |")
    print("|" + "---|" * 7)
    for name, one in groups.items():
        print(
            f"| {name} | {one.problems} | {one.mean:.1%} | {one.worst:.1%} | "
            f"{one.hits} | {one.compared} | {one.reversed} |"
        )


def show_rings(cases: list[Case], predicted: list[float]) -> None:
    """Print median and signed errors of rings, zigzag and stripe on squares, long and short."""
    found: dict[tuple[str, int], dict[tuple[str, bool], list[float]]] = defaultdict(dict)
    for c, seconds in zip(cases, predicted, strict=True):
        square = c.seqlen_q == c.seqlen_kv and c.pattern in ("full", "causal")
        if c.is_eager and c.mode == "normal" and square:
            cells = found[c.gpu, c.nodes]
            cells.setdefault((c.direction, c.seqlen_q < LONG), []).append(
                seconds / c.measured_s - 1
            )
    print("\n| GPU, nodes | forward, S ≥ 64K | forward, S < 64K | backward, S ≥ 64K | ", end="")
    print("backward, S < 64K |\n|" + "---|" * 5)
    for (gpu, nodes), cells in sorted(found.items()):
        texts = []
        for kind in (("fwd", False), ("fwd", True), ("bwd", False), ("bwd", True)):
            gaps = np.array(cells.get(kind, []))
            if not len(gaps):
                texts.append("–")
                continue
            texts.append(f"{np.median(np.abs(gaps)):.1%} ({gaps.mean():+.1%}, n={len(gaps)})")
        print(f"| {gpu}, {nodes} | {' | '.join(texts)} |")


def show_best(cases: list[Case], predicted: list[float]) -> None:
    """Say how often the predicted best of ring, zigzag and stripe is best, or within 3 % of it."""
    cells: dict[tuple[object, ...], dict[str, tuple[float, float]]] = defaultdict(dict)
    for c, seconds in zip(cases, predicted, strict=True):
        if c.is_eager and c.mode == "normal" and c.pattern == "causal" and c.seqlen_q >= 2 * LONG:
            cell = cells[c.gpu, c.nodes, c.direction, c.heads, c.seqlen_q]
            known = cell.get(c.strategy)  # of repeated runs the best
            least = c.measured_s if known is None else min(known[0], c.measured_s)
            cell[c.strategy] = least, seconds
    whole = {key: cell for key, cell in cells.items() if len(cell) > 1}
    counts: dict[object, list[bool]] = defaultdict(list)
    for key, cell in whole.items():
        chosen = min(cell.values(), key=lambda pair: pair[1])
        counts[key[0]].append(chosen[0] <= _NEAR_BEST * min(pair[0] for pair in cell.values()))
    for gpu, right in sorted(counts.items(), key=str):
        print(
            f"\n{gpu}: the best of ring, zigzag and stripe (causal, S >= 128K), or one within 3 %, "
            f"is predicted in {sum(right)} of {len(right)} cells"
        )


def plot(cases: list[Case], predicted: list[float], path: Path) -> None:
    """Draw predicted against measured, log-log, with lines at 10, 30 and 50 %."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 6))
    for gpu in sorted({case.gpu for case in cases}):
        chosen = [(c.measured_s, p) for c, p in zip(cases, predicted, strict=True) if c.gpu == gpu]
        axes.scatter(*zip(*chosen, strict=True), s=2, label=gpu)
    ends = np.array([min(c.measured_s for c in cases), max(c.measured_s for c in cases)])
    for share, style in ((0, "-"), (0.1, "--"), (0.3, "-."), (0.5, ":")):
        for factor in {1 + share, 1 - share}:
            axes.plot(ends, ends * factor, style, color="grey", linewidth=0.6)
    axes.set(xscale="log", yscale="log", xlabel="measured [s]", ylabel="predicted [s]")
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
