#!/usr/bin/env python3
"""Prove the device programs of all strategies, and prove that the proof can be trusted.

    .venv/bin/python scripts/prove_programs.py --json
    .venv/bin/python scripts/prove_programs.py --quick

Each program is emitted from its plan and proved: no races, no deadlock for any timing, the plan's
bytes, messages and sums, within the limits of a device. Then programs are broken at random. The
proof must refuse what is wrong, and runs on this machine's bytes under adverse timings must agree
with it: what it refuses gives other bits, poison or a stop under some timing, what it lets pass
gives the executor's bits under all that are tried. Nothing of this has run on a GPU.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from random import Random

import torch

from harness.base.json_fields import json_text
from harness.check.axes import GRID_PATTERNS, spelled_pattern
from harness.check.cell import start
from harness.errors import DeviceProgramError, UnsupportedError
from harness.execute.interpreter import execute
from harness.execute.transport import LocalTransport
from harness.oracle.reference import inputs_of
from harness.plan.problem import Dtype, Problem
from harness.plan.residency import Program
from harness.plan.tasks import Resident
from harness.play.adversary import Ended, run_under
from harness.play.policies import POLICIES
from harness.prepare.verified_plans import planned
from harness.program.check import check_program
from harness.program.emit import emit
from harness.program.mutations import MUTATIONS
from harness.program.operations import DeviceProgram
from harness.terminal.arguments import count
from patterns import make_pattern
from strategies import EVERY_STRATEGY, LAYER_STRATEGIES, quick

CPS = (1, 2, 3, 4, 8)
QUICK_CPS = (2, 4)
QUICK_PATTERNS = ("causal", "window")
LAYER_OPTIONS = ("", "offload=true", "checkpoint=layer", "sum_gradients=true,round_sent=true")
GPUS_PER_NODE = 3
"""So that some messages of small groups cross nodes, and no group divides into nodes evenly."""
RUNS = 50
"""Timings under which a program that is said to be right must give the same bits."""
MUTATED = ("zigzag", "double_ring:inner=2", "allgather", "ulysses", "grid:rows=2", "owner")


@dataclass(slots=True)
class Report:
    """What was found.

    Attributes:
        programs: How many were emitted.
        proved: How many of them the proof holds for.
        failed: What is wrong, a line each.
        mutants: Broken programs that were tried.
        caught: How many of them the proof refuses.
        kinds: Mutants by what was done and what became of them.
        seconds: Of the whole.
    """

    programs: int = 0
    proved: int = 0
    failed: list[str] = field(default_factory=list)
    mutants: int = 0
    caught: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


def cells(*, short: bool) -> Iterator[tuple[str, Problem]]:
    """Every strategy, pattern and degree, and layers; with `short` some patterns and degrees."""
    patterns = tuple(p for p in GRID_PATTERNS if not short or p in QUICK_PATTERNS)
    degrees = QUICK_CPS if short else CPS
    for number, (name, pattern, cp) in enumerate(product(EVERY_STRATEGY, patterns, degrees)):
        if name not in LAYER_STRATEGIES:
            yield quick(name), _problem(pattern, cp, number)
    for number, (name, cp) in enumerate(product(EVERY_STRATEGY, degrees)):
        options = LAYER_OPTIONS if not short else LAYER_OPTIONS[number % 4 :][:1]
        for text in options:
            spelled = quick(name)
            joined = spelled + (("," if ":" in spelled else ":") + text if text else "")
            yield joined, _problem("causal", cp, number, hidden=11)


def _problem(name: str, cp: int, number: int, hidden: int | None = None) -> Problem:
    queries = 5 * cp + 2
    text, keys = spelled_pattern(name, queries)
    return Problem(
        pattern=make_pattern(text, queries, keys, cross=keys != queries),
        heads_q=8,
        heads_kv=4,
        head_dim=6,
        head_dim_v=4,
        batch=1 + number % 2,
        dtype=(Dtype.BFLOAT16, Dtype.FLOAT32)[number % 2],
        cp=cp,
        hidden=hidden,
        rotary=None if hidden is None else 1e4,
    )


def prove(report: Report, *, short: bool) -> None:
    """Emit and prove all programs."""
    for text, problem in cells(short=short):
        try:
            both = planned(problem, text)
        except UnsupportedError:
            continue
        for resolved in (both.forward, both.backward):
            report.programs += 1
            wrong = refusal(resolved, emit(resolved, GPUS_PER_NODE))
            if wrong:
                report.failed.append(f"{text} {problem.pattern.text} cp={problem.cp} {wrong}")
            else:
                report.proved += 1


def refusal(resolved: Program, program: DeviceProgram) -> str:
    """Why the proof refuses a program; empty if it does not."""
    try:
        check_program(resolved.plan, program)
    except DeviceProgramError as error:
        return str(error)
    return ""


@dataclass(frozen=True, slots=True)
class Subject:
    """A program to break: its plan, its inputs, and the bits that it must give."""

    name: str
    resolved: Program
    program: DeviceProgram
    inputs: Mapping[Resident, torch.Tensor]
    results: Mapping[Resident, torch.Tensor]


def subjects() -> Iterator[Subject]:
    """Programs of a few strategies, both directions."""
    for number, (cp, text) in enumerate(product((4, 3), MUTATED)):
        problem = _problem(("causal", "window")[number % 2], cp, number)
        try:
            both = planned(problem, text)
        except UnsupportedError:
            continue
        tensors = inputs_of(problem, 0)
        saved: Mapping[Resident, torch.Tensor] = {}
        for resolved in (both.forward, both.backward):
            inputs = start(resolved.plan, tensors, saved, range(cp))
            saved = execute(resolved, inputs, LocalTransport(cp)).results
            name = f"{text} cp={cp} {resolved.plan.direction.value}"
            yield Subject(name, resolved, emit(resolved, GPUS_PER_NODE), inputs, saved)


def same_bits(ended: Ended, wanted: Mapping[Resident, torch.Tensor]) -> bool:
    """Whether a run came to its end with these results, and no message changed on its way."""
    if ended.stuck or ended.changed:
        return False
    return all(
        torch.equal(_bits(ended.results[resident]), _bits(tensor))
        for resident, tensor in wanted.items()
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def agrees(subject: Subject, program: DeviceProgram, draw: Random, *, right: bool) -> bool:
    """Whether runs agree with the proof that a program is right, or wrong."""
    names = [*POLICIES] * -(-RUNS // len(POLICIES))
    for name in names[:RUNS]:
        policy = POLICIES[name](Random(draw.random()))
        ended = run_under(subject.resolved.plan, program, subject.inputs, policy)
        if not same_bits(ended, subject.results):
            return not right
    return right


def break_programs(report: Report, wanted: int, seed: int) -> None:
    """Break programs until so many mutants were refused and so many let pass."""
    draw = Random(seed)
    found = list(subjects())
    fates: Counter[bool] = Counter()
    for kind in list(MUTATIONS) * 20 * wanted:
        if fates[True] >= wanted and fates[False] >= wanted:
            break
        subject = draw.choice(found)
        mutant = MUTATIONS[kind](subject.program, draw)
        if mutant is None or mutant == subject.program:
            continue
        wrong = refusal(subject.resolved, mutant)
        if fates[bool(wrong)] >= wanted:
            continue
        fates[bool(wrong)] += 1
        report.mutants += 1
        report.caught += bool(wrong)
        report.kinds[f"{kind}: {'refused' if wrong else 'harmless'}"] += 1
        if not agrees(subject, mutant, draw, right=not wrong):
            verdict = f"refused ({wrong}), but runs agree" if wrong else "proved, but runs differ"
            report.failed.append(f"{subject.name}, {kind}: {verdict}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was found; 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a part of the grid, a few mutants")
    parser.add_argument("--mutants", type=count, help="of those refused and of those let pass")
    parser.add_argument("--seed", type=int, default=0, help="what is broken and how, such as 1")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    report, begin = Report(), time.perf_counter()
    prove(report, short=args.quick)
    break_programs(report, args.mutants or (8 if args.quick else 200), args.seed)
    report.seconds = round(time.perf_counter() - begin, 2)
    if args.json:
        fields = ("programs", "proved", "failed", "mutants", "caught", "kinds", "seconds")
        print(json_text({name: getattr(report, name) for name in fields}))
    else:
        print(f"{report.proved} of {report.programs} device programs are proved")
        print(f"{report.caught} of {report.mutants} mutants are refused:")
        for kind, number in sorted(report.kinds.items()):
            print(f"  {number:4} {kind}")
        for line in report.failed:
            print(f"FAILED {line}")
        print(f"{report.seconds:.1f} s")
    return bool(report.failed)


if __name__ == "__main__":
    sys.exit(main())
