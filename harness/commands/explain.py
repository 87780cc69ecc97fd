"""Check whether a configuration is supported, and show its costs or the nearest supported ones.

Costs are communication volume, memory and load balance, counted in plans that were proved.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

from rich.box import SIMPLE_HEAD
from rich.table import Table

from harness.base.json_fields import json_text
from harness.base.workers import cores, spread
from harness.cluster.presets import DEFAULT_CLUSTER, cluster
from harness.commands.explain_model import add_model, run_model
from harness.commands.explain_time import explained_times, times_json, times_text
from harness.errors import UnsupportedError
from harness.explain import placements
from harness.explain.explanation import Costs, Explanation, as_json, explain
from harness.plan.problem import Problem
from harness.prepare.planner_context import context_on
from harness.report.format import broken
from harness.terminal.arguments import Help, Verbs, add_problem, example, given, problem_of
from harness.terminal.progress import Live, Output
from strategies import AUTO, EVERY_STRATEGY, STRATEGIES, strategy

_MIB = 2**20
_LETTERS = (
    "t, T: query and key tokens of a rank; n, m: its query and KV heads; b, a: bytes of an element "
    "and of a partial result; U x R: ranks that trade heads x ring; hops: R, or R-1 if pruned"
)
_LEGEND = (
    "recv., peak: MiB that the busiest rank receives and holds; imbal.: its work over the mean, in "
    "total and step by step; heads: query heads per rank, at most / on average; KV copies: ranks "
    "that hold each KV head. Bytes and areas are counted exactly in proved plans."
)
_PLACED = ("imbal.\ntotal", "imbal.\nsteps", "recv.\nall", "recv.\nmost", "recv.\nbwd", "ms")
_PLACED_LEGEND = (
    "recv.: MiB received by all ranks, and by the one that receives most, forward; by all, "
    "backward. ms: predicted, both passes. Bytes and exact areas of plans that were proved."
)
_MANY_RANKS = 32  # from here on planning takes longer than starting processes for it
_LABEL = 20
_NAME = 18


def register(subparsers: Verbs, summary: str | None = None) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "explain",
        help=summary,
        description=__doc__,
        epilog=example(
            [
                "explain --pattern full --cp 8",
                "explain --strategy ring --pattern causal --cp 4",
                "explain --strategy ulysses --heads-q 40 --heads-kv 8 --cp 64   # exit status 1",
                "explain --strategy usp:4x2 --seqlen 1m --json",
                "explain --strategy allgather --placements --pattern documents:preset=megatron",
                "explain --scope layer --heads-kv 8 --seqlen 1m",
                "explain --model llama3-8b --cluster h100-1x8 --max-context",
                "explain --model llama3-8b,layers=16 --cluster h100-2x8 --seqlen 2m --json",
            ]
        ),
        formatter_class=Help,
    )
    parser.add_argument(
        "--strategy", type=_named, help="one strategy with options, e.g. usp:4x2 (default: all)"
    )
    add_problem(parser)
    parser.add_argument(
        "--placements",
        action="store_true",
        help="all placements of tokens of one strategy, side by side (with --strategy)",
    )
    add_model(parser)
    parser.add_argument(
        "--json", action="store_true", help="print JSON (a list, or one object with --strategy)"
    )
    parser.set_defaults(run=run)


def _named(text: str) -> str:
    try:
        if text != AUTO:
            strategy(text)
    except (ValueError, UnsupportedError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def run(args: argparse.Namespace) -> int:
    """Explain one strategy or all; 1 if the one that was asked for is not legal."""
    if args.model is not None:
        return run_model(args)
    timed = args.placements or args.strategy is not None
    idle = given(args, add_model, *(["cluster"] if timed else []))
    if idle:
        raise ValueError(f"{idle}: these only apply to a whole model; add --model")
    problem = problem_of(args)
    if args.placements:
        return _run_placements(args, problem)
    every = STRATEGIES if problem.hidden is None else EVERY_STRATEGY
    names = [args.strategy] if args.strategy else list(every)
    answers = _answers(names, problem, alternatives=bool(args.strategy))
    machine = cluster(args.cluster or DEFAULT_CLUSTER)
    times = explained_times(strategy(names[0]), answers[0], machine) if args.strategy else {}
    if args.json:
        body: object = [as_json(answer) for answer in answers]
        if args.strategy:
            body = {**as_json(answers[0]), "time": times_json(times, machine) if times else None}
        sys.stdout.write(json_text(body, indent=2) + "\n")
    else:
        console = Output(markup=False, highlight=False)
        console.print(_title(answers))
        console.print()
        if args.strategy:
            console.print(_one(answers[0], console.width))
            if times:
                console.print(times_text(times, machine, console.width))
        else:
            _print_all(console, answers)
    return 1 if args.strategy and not answers[0].legal else 0


def _run_placements(args: argparse.Namespace, problem: Problem) -> int:
    """Show all placements of one strategy."""
    if args.strategy is None:
        raise ValueError("--placements is of one strategy; add --strategy allgather, for example")
    machine = cluster(args.cluster or DEFAULT_CLUSTER)
    context = context_on(machine)
    seconds = context.evaluate if problem.cp <= machine.gpus else None
    rows = placements.placements(strategy(args.strategy), problem, context, seconds)
    fastest = placements.fastest_placement(rows)
    if args.json:
        body = {
            "rows": [asdict(row) for row in rows],
            "fastest": None if fastest is None else fastest.strategy,
            "cluster": machine.name,
            "balanced": asdict(placements.deal_reach(problem)),
            "padding_tokens": placements.padding(problem),
        }
        sys.stdout.write(json_text(body, indent=2) + "\n")
        return 0
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    table.add_column("placement", no_wrap=True)
    for head in _PLACED:
        table.add_column(head, justify="right", no_wrap=True)
    for name, *figures in placements.placement_rows(rows):
        table.add_row(broken(name, 2 * _NAME), *figures)
    console = Output(markup=False, highlight=False)
    console.print(table)
    console.print(_PLACED_LEGEND)
    for note in placements.placement_notes(rows, problem, machine.name):
        console.print(note)
    return 0


def _answers(names: Sequence[str], problem: Problem, *, alternatives: bool) -> list[Explanation]:
    """Explain each, side by side where planning takes long."""
    work = partial(_explained, problem, alternatives)
    jobs = min(cores(), len(names))
    with Live("explain", len(names)) as live:
        answers: dict[str, Explanation] = {}
        alone = jobs == 1 or problem.cp < _MANY_RANKS
        found = map(work, names) if alone else spread(work, names, jobs=jobs, lost=work)
        for answer in found:
            answers[answer.strategy] = answer
            live.advance()
    return [answers[strategy(name).text] for name in names]


def _explained(problem: Problem, alternatives: bool, name: str) -> Explanation:
    return explain(strategy(name), problem, alternatives=alternatives)


def _title(answers: Sequence[Explanation]) -> str:
    problem = answers[0].problem
    length = f"{problem.seqlen_q}"
    if problem.seqlen_kv != problem.seqlen_q:
        length += f" queries x {problem.seqlen_kv} keys"
    layer = "attention layer"
    if problem.hidden is not None:
        layer = f"whole layer of width {problem.hidden}"
    costs = [answer.costs for answer in answers if answer.costs is not None]
    if costs:
        least, most = min(c.tokens_min for c in costs), max(c.tokens_max for c in costs)
        length += f" tokens ({_span(least, most)} a rank)"
    else:
        length += " tokens"
    return (
        f"{problem.pattern.text}, {length}, batch {problem.batch}, {problem.heads_q} query and "
        f"{problem.heads_kv} KV heads of {problem.head_dim}, {problem.dtype.value}, "
        f"cp {problem.cp}; one {layer}, the busiest rank"
    )


def _one(answer: Explanation, width: int) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", width=_LABEL, no_wrap=True)
    rest = width - _LABEL - 4  # two spaces between columns
    table.add_column(answer.strategy, overflow="fold", max_width=max(rest // 2 + 1, 1))
    table.add_column("how known", overflow="fold", max_width=max(rest // 2, 1))
    if answer.costs is None:
        table.add_row("legal", "no", "asked the strategy")
        table.add_row("why", answer.reason, "")
        if not answer.nearest:
            for hint in answer.hints:
                table.add_row("it suggests", hint, "not tried")
        for near in answer.nearest:
            cost = f"planned; imbalance {near.imbalance_total:.3f}"
            table.add_row("near and legal", near.flags, cost)
        return table
    costs = answer.costs
    table.add_row("legal", "yes", "planned and proved, forward and backward")
    if answer.resolved != answer.strategy or answer.resolved_backward != answer.strategy:
        same = answer.resolved == answer.resolved_backward
        both = f"{answer.resolved} forward, {answer.resolved_backward} backward"
        table.add_row("it chose", answer.resolved if same else both, "options left to the strategy")
    for near in answer.evener[:1]:
        text = f"planned; imbalance {near.imbalance_total:.3f}, not {costs.imbalance_total:.3f}"
        table.add_row("more even", near.flags, text)
    table.add_row("query tokens", _span(costs.tokens_min, costs.tokens_max), "plan")
    heads = f"{costs.heads_max} at most, {costs.heads_mean:.4g} on average"
    table.add_row("query heads", heads, "plan")
    copies = f"{costs.kv_heads_max} at most, {costs.kv_copies:.4g} copies of each on average"
    table.add_row("KV heads", copies, "plan")
    _volumes(table, costs, layer=answer.problem.hidden is not None)
    table.add_row("imbalance", f"{costs.imbalance_total:.4f}", "areas: max / mean over ranks")
    table.add_row(
        "imbalance, lockstep",
        f"{costs.imbalance_lockstep:.4f}",
        "areas: sum over steps of max / mean",
    )
    table.add_row("memory, at least", _mib(costs.memory_bytes_lower_bound), "inputs and outputs")
    for name, peak, uses in (
        ("forward", costs.peak_bytes, costs.peak_uses_bytes),
        ("backward", costs.peak_bytes_backward, costs.peak_uses_bytes_backward),
    ):
        parts = ", ".join(f"{use} {size / _MIB:.1f}" for use, size in uses.items() if size)
        table.add_row(f"peak, {name}", _mib(peak), f"ledger of the plan: {parts} MiB")
    table.add_row("saved for backward", _mib(costs.saved_bytes), "plan")
    for name, needed in (
        ("forward", costs.peak_bytes_algorithm),
        ("backward", costs.peak_bytes_algorithm_backward),
    ):
        what = "ledger: values until their last use, sums as wide as values, no copies"
        table.add_row(f"algorithm, {name}", _mib(needed), what)
    if costs.host_peak_bytes:
        table.add_row("host memory, peak", _mib(costs.host_peak_bytes), "ledger of the plans")
        for name, moved in (
            ("forward", costs.host_bytes),
            ("backward", costs.host_bytes_backward),
        ):
            table.add_row(f"host moves, {name}", _mib(moved), "plan")
    if costs.project_flops:
        spent = (costs.project_flops / 1e9, costs.project_flops_backward / 1e9)
        table.add_row(
            "projecting q, k, v",
            f"{spent[0]:.1f} GFLOP forward, {spent[1]:.1f} again backward",
            "plan",
        )
    for hiding in costs.hiding:
        verdict = "hides" if hiding.hidden else "does not hide"
        table.add_row(
            f"on {hiding.link}",
            f"ring {verdict}: {costs.block_tokens} tokens to a block, needs "
            f"{hiding.block_tokens:.0f}",
            f"c >= F/B, nothing masked; {hiding.source}",
        )
    return table


def _volumes(table: Table, costs: Costs, *, layer: bool) -> None:
    rows = (
        ("forward", costs.volume_bytes, costs.closed_form_bytes),
        ("backward", costs.volume_bytes_backward, costs.closed_form_bytes_backward),
    )
    for name, counted, formula in rows:
        known = "plan; no closed form is known for this pattern, lengths and heads"
        if layer:
            known = "plan; closed forms cover attention only, not layers"
        if formula is not None:
            known = f"plan; closed form gives {_mib(formula)}"
        table.add_row(f"received, {name}", _mib(counted), known)
    rounding = (costs.rounding_bytes, costs.rounding_bytes_backward)
    if any(rounding):
        more = " forward, ".join(f"{size / _MIB:.2f}" for size in rounding)
        table.add_row("rounding adds", f"{more} backward, MiB", "all ranks: plans with align=1 too")
    if costs.closed_form is not None:
        table.add_row("closed form, forward", costs.closed_form, costs.closed_form_source)
        table.add_row("closed form, backward", costs.closed_form_backward, _LETTERS)


def _print_all(console: Output, answers: Sequence[Explanation]) -> None:
    console.print(_all(answers))
    console.print(_LEGEND)
    for note in _notes(answers):
        console.print(note)


def _all(answers: Sequence[Explanation]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    names = [answer.resolved or answer.strategy for answer in answers]
    table.add_column("strategy", no_wrap=True)
    for head in (
        *("recv.\nfwd", "recv.\nbwd", "imbal.\ntotal", "imbal.\nsteps"),
        *("peak\nfwd", "peak\nbwd", "heads", "KV\ncopies"),
    ):
        table.add_column(head, justify="right", no_wrap=True)
    for name, answer in zip(names, answers, strict=True):
        costs = answer.costs
        if costs is None:
            table.add_row(broken(name, _NAME), "not legal", *[""] * 7)
            continue
        mean = f"/{costs.heads_mean:.3g}" if costs.heads_mean != costs.heads_max else ""
        table.add_row(
            broken(name, _NAME),
            _figures(costs.volume_bytes),
            _figures(costs.volume_bytes_backward),
            f"{costs.imbalance_total:.3f}",
            f"{costs.imbalance_lockstep:.3f}",
            _figures(costs.peak_bytes),
            _figures(costs.peak_bytes_backward),
            f"{costs.heads_max}{mean}",
            f"{costs.kv_copies:.3g}",
        )
    return table


def _notes(answers: Sequence[Explanation]) -> list[str]:
    """Notes below the table: equal rows, more even placements, and refusals."""
    legal = [answer for answer in answers if answer.legal]
    notes = [f"the same plan: {names}" for names in _alike(legal, lambda one: one.work_hash)]
    others = list({answer.work_hash: answer for answer in reversed(legal)}.values())[::-1]
    notes += [f"equal in all but memory: {names}" for names in _alike(others, _work)]
    for answer in answers:
        for near in answer.evener[:1]:
            assert answer.costs is not None  # only a legal row has a placement to improve
            notes.append(
                f"{answer.strategy}: more even with {near.flags} (imbalance "
                f"{near.imbalance_total:.3f}, not {answer.costs.imbalance_total:.3f})"
            )
        if answer.resolved != answer.resolved_backward:
            notes.append(f"{answer.strategy}: {answer.resolved_backward} backward")
        if answer.reason is not None:
            tried = f"; try {', '.join(answer.hints)}" if answer.hints else ""
            notes.append(answer.reason + tried)
    return notes


def _alike(answers: Sequence[Explanation], key: Callable[[Explanation], object]) -> list[str]:
    """Names of strategies with the same key, one text per group of several."""
    groups: dict[str, list[str]] = {}
    for answer in answers:
        groups.setdefault(repr(key(answer)), []).append(answer.resolved or answer.strategy)
    return [", ".join(names) for names in groups.values() if len(names) > 1]


def _work(answer: Explanation) -> object:
    """All values of a row but its memory, to tell equal rows."""
    costs = answer.costs
    assert costs is not None  # every row here is legal
    received = costs.volume_bytes, costs.volume_bytes_backward
    heads = costs.heads_max, costs.heads_mean, costs.kv_copies
    return received, costs.imbalance_total, costs.imbalance_lockstep, heads


def _figures(count: int) -> str:
    mib = count / _MIB
    if mib >= 9999.95:
        return f"{mib:.0f}"
    return f"{mib:.1f}" if mib >= 9.995 else f"{mib:.3g}"


def _span(least: int, most: int) -> str:
    return f"{most}" if least == most else f"{least} to {most}"


def _mib(count: int) -> str:
    return f"{count / _MIB:.1f} MiB ({count} bytes)"
