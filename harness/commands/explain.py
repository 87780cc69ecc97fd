"""`explain`: is this legal; if not why, and what is near; what it moves, holds and balances."""

import argparse
import json
import sys

from rich.console import Console
from rich.table import Table

from harness.commands.arguments import add_problem, example, problem_of
from harness.explain import Costs, Explanation, as_json, explain
from strategies import EVERY_STRATEGY, STRATEGIES, strategy

_MIB = 2**20
_LETTERS = (
    "t, T: query and key tokens of a rank; n, m: its query and KV heads; b, a: bytes of an element "
    "and of a partial result; U x R: ranks that trade heads x ring; hops: R, or R-1 if pruned"
)
_WIDE = 130  # columns of a table that goes to a file or pipe


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "explain",
        help="is a strategy legal for a problem, what is near, what does it cost",
        description=__doc__,
        epilog=example(
            [
                "explain --pattern full --cp 8",
                "explain --strategy ring --pattern causal --cp 4",
                "explain --strategy ulysses --heads-q 40 --heads-kv 8 --cp 64   # exit status 1",
                "explain --strategy usp:4x2 --seqlen 1m --json",
                "explain --scope layer --heads-kv 8 --seqlen 1m",
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--strategy", type=_named, help="one strategy, with options; default all")
    add_problem(parser)
    parser.add_argument("--json", action="store_true", help="print JSON: a list without --strategy")
    parser.set_defaults(run=run)


def _named(text: str) -> str:
    try:
        strategy(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def run(args: argparse.Namespace) -> int:
    """Explain one strategy or all; 1 if the one that was asked for is not legal."""
    problem = problem_of(args)
    every = STRATEGIES if problem.hidden is None else EVERY_STRATEGY
    names = [args.strategy] if args.strategy else list(every)
    answers = [explain(strategy(name), problem) for name in names]
    if args.json:
        body: object = [as_json(answer) for answer in answers]
        if args.strategy:
            body = as_json(answers[0])
        sys.stdout.write(json.dumps(body, indent=2) + "\n")
    else:
        console = Console(markup=False, width=None if sys.stdout.isatty() else _WIDE)
        console.print(_title(answers[0]))
        console.print(_one(answers[0]) if args.strategy else _all(answers))
    return 1 if args.strategy and not answers[0].legal else 0


def _title(answer: Explanation) -> str:
    problem = answer.problem
    length = f"{problem.seqlen_q}"
    if problem.seqlen_kv != problem.seqlen_q:
        length += f" queries x {problem.seqlen_kv} keys"
    layer = "attention layer"
    if problem.hidden is not None:
        layer = f"whole layer of width {problem.hidden}"
    return (
        f"{problem.pattern.text}, {length} tokens, batch {problem.batch}, {problem.heads_q} query "
        f"and {problem.heads_kv} KV heads of {problem.head_dim}, {problem.dtype.value}, "
        f"cp {problem.cp}; one {layer}, the busiest rank"
    )


def _one(answer: Explanation) -> Table:
    table = Table("", answer.strategy, "how known")
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
    table.add_row("query tokens", _span(costs.tokens_min, costs.tokens_max), "plan")
    heads = f"{costs.heads_max} at most, {costs.heads_mean:.4g} on average"
    table.add_row("query heads", heads, "plan")
    copies = f"{costs.kv_heads_max} at most, {costs.kv_copies:.4g} copies of each on average"
    table.add_row("KV heads", copies, "plan")
    _volumes(table, costs)
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
        table.add_row(f"memory, peak {name}", _mib(peak), f"ledger of the plan: {parts} MiB")
    table.add_row("saved for backward", _mib(costs.saved_bytes), "plan")
    if costs.host_peak_bytes:
        table.add_row("host memory, peak", _mib(costs.host_peak_bytes), "ledger of the plans")
        for name, moved in (
            ("forward", costs.host_bytes),
            ("backward", costs.host_bytes_backward),
        ):
            table.add_row(f"to and from the host, {name}", _mib(moved), "plan")
    for hiding in costs.hiding:
        verdict = "hides" if hiding.hidden else "does not hide"
        table.add_row(
            f"ring over {hiding.link}",
            f"{verdict}: {costs.block_tokens} tokens to a block, needs {hiding.block_tokens:.0f}",
            f"c >= F/B, nothing masked; {hiding.source}",
        )
    return table


def _volumes(table: Table, costs: Costs) -> None:
    rows = (
        ("forward", costs.volume_bytes, costs.closed_form_bytes),
        ("backward", costs.volume_bytes_backward, costs.closed_form_bytes_backward),
    )
    for name, counted, formula in rows:
        known = "plan; no closed form for this pattern and these lengths and heads"
        if formula is not None:
            known = f"plan; closed form gives {_mib(formula)}"
        table.add_row(f"received, {name}", _mib(counted), known)
    if costs.closed_form is not None:
        table.add_row("closed form, forward", costs.closed_form, costs.closed_form_source)
        table.add_row("closed form, backward", costs.closed_form_backward, _LETTERS)


def _all(answers: list[Explanation]) -> Table:
    table = Table("strategy")
    for column in ("forward", "backward"):
        table.add_column(f"received\n{column} [MiB]", justify="right")
    for column in (
        "imbalance\ntotal",
        "imbalance\nlockstep",
        "peak\nforward [MiB]",
        "peak\nbackward [MiB]",
    ):
        table.add_column(column, justify="right")
    for column in ("tokens", "heads\nmax / mean", "KV\ncopies"):
        table.add_column(column, justify="right")
    for answer in answers:
        costs = answer.costs
        if costs is None:
            table.add_row(answer.strategy, "not legal", *[""] * 8)
            continue
        table.add_row(
            answer.strategy,
            f"{costs.volume_bytes / _MIB:.1f}",
            f"{costs.volume_bytes_backward / _MIB:.1f}",
            f"{costs.imbalance_total:.3f}",
            f"{costs.imbalance_lockstep:.3f}",
            f"{costs.peak_bytes / _MIB:.1f}",
            f"{costs.peak_bytes_backward / _MIB:.1f}",
            _span(costs.tokens_min, costs.tokens_max),
            f"{costs.heads_max} / {costs.heads_mean:.4g}",
            f"{costs.kv_copies:.4g}",
        )
    refused = [answer.reason for answer in answers if answer.reason is not None]
    table.caption = "\n".join(["bytes and exact areas of plans that were proved", *refused])
    table.caption_justify = "left"
    return table


def _span(least: int, most: int) -> str:
    return f"{most}" if least == most else f"{least} to {most}"


def _mib(count: int) -> str:
    return f"{count / _MIB:.1f} MiB ({count} bytes)"
