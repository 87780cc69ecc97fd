"""`explain --model`: peaks, longest contexts and step times of a model under every strategy."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from harness.base.json_fields import json_text
from harness.base.workers import cores, spread
from harness.cluster.presets import cluster
from harness.memory.counting import Use
from harness.terminal.arguments import add_problem, given, length, positive_number
from harness.terminal.arguments import model_named as read_model
from harness.terminal.progress import Live, Output
from harness.training.answer import Answer, Question, answer
from harness.training.named_models import MODELS
from harness.training.stack import HOST_BYTES, STEP_TOKENS, Column, Stack, as_run
from strategies import EVERY_STRATEGY, strategy

_GIB = 2**30
_K, _M = 2**10, 2**20
_CLUSTER = "h100-1x8"
_MANY = 4
"""Strategies from which on processes are worth their start."""
_BAR = 22
_LETTERS: Mapping[str, tuple[str, ...]] = {
    "W": ("states", "unsharded"),
    "R": ("stream",),
    "s": (Use.SAVED, Use.RESULT),
    "g": (Use.GATHERED, Use.LOCAL),
    "r": (Use.RECEIVED,),
    "a": (Use.ACCUMULATOR,),
    "k": (Use.WORKSPACE, Use.STAGING),
    "m": ("mlp", "loss"),
}
_LEGEND = (
    "W states and weights, R residual stream and block inputs, s saved for backward, g gathered "
    "heads and own projections, r receive buffers, a accumulators, k kernels and copies, m MLP or "
    "loss"
)
_COLUMNS = (
    "released: as the released code of the strategy holds memory (* none known: as impl.); impl.: "
    "float32 sums, results and scratch of kernels, the same flags for all; algor.: what the "
    "algorithm needs"
)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a whole model."""
    group = parser.add_argument_group(
        "a whole model (trained over all GPUs of a cluster; instead of one layer)"
    )
    known = f"{', '.join(MODELS)}, or key=value pairs"
    group.add_argument("--model", type=read_model, help=known)
    group.add_argument(
        "--cluster",
        help=f"cluster to train on (default: {_CLUSTER}), or with --strategy to simulate",
    )
    group.add_argument(
        "--max-context",
        action="store_true",
        help="find the longest context that fits, instead of taking --seqlen",
    )
    group.add_argument(
        "--gpu-memory", type=positive_number, help="memory of a GPU, GiB (default: the cluster's)"
    )
    group.add_argument(
        "--host-memory",
        type=positive_number,
        help=f"host memory of a node, GiB (default: {HOST_BYTES / _GIB:.0f})",
    )
    group.add_argument(
        "--step", type=length, help="granularity of the context search (default: 1m per node)"
    )
    for name in ("checkpoint", "offload", "tiled"):
        help_text = (
            f"train without {name} of blocks"
            if name != "tiled"
            else "do not tile the MLP and the loss"
        )
        group.add_argument(
            f"--no-{name}", dest=name, action="store_false", default=True, help=help_text
        )


def run_model(args: argparse.Namespace) -> int:
    """Answer for one strategy or all; 1 if the one asked for is not legal, or no context fits."""
    idle = given(args, add_problem, *([] if args.max_context else ["seqlen"]))
    if idle:
        raise ValueError(
            f"{idle}: a model is trained over all GPUs of its cluster, in shapes of its own, causal"
            + (", and --max-context finds the length" if args.max_context else "")
            + "; leave these out, or give --model key=value pairs"
        )
    if args.step is not None and not args.max_context:
        raise ValueError("--step only applies to the context search; add --max-context")
    machine = cluster(args.cluster or _CLUSTER)
    step = None
    if args.max_context:
        step = args.step or STEP_TOKENS * machine.nodes
    question = Question(
        model=args.model,
        machine=machine,
        stack=Stack(checkpoint=args.checkpoint, offload=args.offload, tiled=args.tiled),
        gpu_bytes=_bytes("--gpu-memory", args.gpu_memory, machine.gpu.memory_bytes),
        host_bytes=_bytes("--host-memory", args.host_memory, HOST_BYTES),
        step_tokens=step,
        seqlen=args.seqlen,
    )
    names = [args.strategy] if args.strategy else list(EVERY_STRATEGY)
    answers = _answers(question, names)
    if args.json:
        sys.stdout.write(json_text(as_json(question, answers), indent=2) + "\n")
    else:
        _print(Output(markup=False, highlight=False), question, answers)
    if question.step_tokens is not None and all(found.at is None for found in answers):
        print(
            f"explain: no context fits, not even {_short(question.step_tokens)} tokens; give more "
            "--gpu-memory or a smaller --step",
            file=sys.stderr,
        )
        return 1
    return 1 if args.strategy and answers[0].reason is not None else 0


def _answers(question: Question, names: Sequence[str]) -> list[Answer]:
    """Ask about each, side by side where that is worth starting processes for."""
    work, jobs = partial(answer, question), min(cores(), len(names))
    alone = jobs == 1 or len(names) < _MANY
    with Live("explain", len(names)) as live:
        found: dict[str, Answer] = {}
        for one in map(work, names) if alone else spread(work, names, jobs=jobs, lost=work):
            found[one.name] = one
            live.advance()
    return [found[name] for name in names]


def _bytes(flag: str, gib: float | None, default: int) -> int:
    if gib is None:
        return default
    if round(gib * _GIB) < 1:
        raise ValueError(f"{flag} ({gib:g} GiB) must be a byte or more; it is in GiB, such as 80")
    return round(gib * _GIB)


def as_json(question: Question, answers: Sequence[Answer]) -> dict[str, object]:
    """Return the fields of `--json`."""
    legal = [found for found in answers if found.reason is None]
    body: dict[str, object] = {
        "model": question.model.name,
        "parameters": question.model.parameters,
        "cluster": question.machine.name,
        "gpus": question.machine.gpus,
        "rates": as_run(question.machine).calibration,
        "gpu_limit_bytes": question.gpu_bytes,
        "host_limit_bytes_per_node": question.host_bytes,
        "step_tokens": question.step_tokens,
    }
    if question.step_tokens is not None:
        body["max_context"] = {
            found.name: found.limits[Column.RELEASED].tokens for found in legal if found.limits
        }
        body["max_context_by_column"] = {
            column.value: {
                found.name: found.limits[column].tokens for found in legal if found.limits
            }
            for column in Column
        }
        body["limited_by"] = {
            found.name: found.limits[Column.RELEASED].by for found in legal if found.limits
        }
    body["strategies"] = [_one_json(found) for found in answers]
    return body


def _one_json(found: Answer) -> dict[str, object]:
    at, time = found.at, found.time
    return {
        "name": found.name,
        "strategy": found.strategy,
        "reason": found.reason,
        "released_code_known": found.released,
        "seqlen": found.seqlen,
        "peak_bytes": at and at.peak_bytes,
        "peak_bytes_by_column": {k.value: v for k, v in (found.peaks_bytes or {}).items()},
        "phase": at and at.phase,
        "parts_bytes": dict(at.parts) if at else {},
        "host_bytes_per_node": at and at.host_bytes,
        "step_s": time and time.seconds,
        "launch_s": time and time.launch_s,
        "linear_s": time and time.linear_s,
        "quadratic_s": time and time.quadratic_s,
        "terms_s": dict(time.terms) if time else {},
    }


# For people ---------------------------------------------------------------------------------


def _print(console: Console, question: Question, answers: Sequence[Answer]) -> None:
    shape, machine = question.model, question.machine
    console.print(
        f"{shape.name}, {shape.parameters / 1e9:.2f} billion parameters, batch 1, bfloat16, over "
        f"{machine.gpus} x {machine.gpu.name}; one limit for all: "
        f"{_gib(question.gpu_bytes, 1)} GiB a GPU ({_gib(question.host_bytes, 0)} GiB a host)"
    )
    console.print()
    console.print(_table(question, answers))
    console.print()
    console.print(f"{_BAR} signs are the limit: {_LEGEND}")
    console.print(_COLUMNS)
    if question.step_tokens is not None:
        console.print(
            f"contexts in steps of {_short(question.step_tokens)}; GiB, bar and s at the longest "
            "context of `released`; h: host memory limits the context"
        )
    rates = as_run(machine).calibration
    console.print(f"memory: ledger of the plan, scaled, and formulas; s a step: simulated, {rates}")
    if question.step_tokens is not None:
        console.print(
            "s a step: a training step at each row's own longest context, so compare only rows of "
            "equal context; --seqlen without --max-context gives all rows the same"
        )
    for note in notes(answers):
        console.print(note)
    for found in answers:
        if found.reason is not None:
            console.print(found.reason)


def notes(answers: Sequence[Answer]) -> list[str]:
    """Notes of the strategies on their memory figures, each once."""
    said = (strategy(found.name).strategy.training.note for found in answers)
    return list(dict.fromkeys(filter(None, said)))


def _gib(size: int, digits: int) -> str:
    """Bytes in GiB; a size that so few digits would show as nothing has three that count."""
    value = size / _GIB
    return f"{value:.{digits}f}" if value >= 0.5 * 10**-digits else f"{value:.3g}"


def _table(question: Question, answers: Sequence[Answer]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("strategy", overflow="fold")
    for column in ("released", "impl.", "algor."):
        name = f"longest\n{column}" if question.step_tokens else f"GiB\n{column}"
        table.add_column(name, justify="right")
    if question.step_tokens:
        table.add_column("GiB", justify="right")
    table.add_column("what fills it", no_wrap=True)
    table.add_column("s a\nstep", justify="right")
    for found in answers:
        if found.reason is not None:
            table.add_row(found.strategy, "illegal")
            continue
        if found.limits:
            cells = [_short(found.limits[column].tokens) for column in _ORDER]
            cells[0] += "h" if found.limits[Column.RELEASED].by == "host" else ""
            cells.append(f"{found.at.peak_bytes / _GIB:.1f}" if found.at else "")
        else:
            peaks = found.peaks_bytes or {}
            cells = [f"{peaks[column] / _GIB:.1f}" for column in _ORDER]
        cells[0] += "" if found.released else "*"
        seconds = f"{found.time.seconds:.0f}" if found.time else ""
        table.add_row(found.strategy, *cells, bar(found, question.gpu_bytes), seconds)
    return table


_ORDER = (Column.RELEASED, Column.IMPLEMENTATION, Column.ALGORITHM)


def bar(found: Answer, limit_bytes: int) -> str:
    """Draw what fills a GPU: as many signs as `_BAR` is wide are the limit."""
    if found.at is None:
        return "does not fit"
    drawn, reached = "", 0
    for letter, names in _LETTERS.items():
        reached += sum(found.at.parts.get(name, 0) for name in names)
        drawn += letter * (round(reached / limit_bytes * _BAR) - len(drawn))
    return drawn[:_BAR].ljust(_BAR, ".") + (">" if reached > limit_bytes else "")


def _short(tokens: int) -> str:
    if tokens % _M == 0:
        return f"{tokens // _M}M" if tokens else "0"
    return f"{tokens // _K}K" if tokens % _K == 0 else str(tokens)
