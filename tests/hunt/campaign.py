"""Judge changed plans: each must be refused by its rule, or run and be right.

What the verifier accepts is run on all ranks in float64 with every fresh buffer full of NaN, and
each result and each piece that is saved is compared with the dense truth. The second proof, on
sets of contributions, has its say about every plan that can be read.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from random import Random
from typing import Any
from unittest import mock

import torch

from harness.errors import PlanError, UnsupportedError
from harness.execute.interpreter import Run, execute
from harness.execute.shards import initial_inputs
from harness.execute.transport import LocalTransport
from harness.memory.ledger import ledger
from harness.plan.heads import members
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.reader import from_json
from harness.plan.residency import Program
from harness.plan.sizes import is_accumulated
from harness.plan.tasks import Piece, Tensor
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import EVERY_STRATEGY, LAYER_STRATEGIES, quick, strategy
from tests.hunt.mutants import mutant
from tests.hunt.provenance import verdict
from tests.hunt.truth import truth

FLOAT64 = 1e-12
NAMES = (
    *map(quick, EVERY_STRATEGY),
    "double_ring:inner=2",
    "usp:ring_inside=true",
    "allgather:placement=zigzag",
    "grid:fused=true",
    "fpdt:parts=2,checkpoint=layer,offload=true",
    "upipe:checkpoint=layer",
    "zigzag:checkpoint=attention,sum_gradients=true",
    "ulysses:checkpoint=layer,offload=true",
)
LAYERED = ("checkpoint", "sum_gradients")
PATTERNS = ("causal", "full", "window:left=4", "documents:lengths=4+7", "star:blocks=5")


class Outcome:
    """How a changed plan ended."""

    UNREAD = "no plan to the reader"
    REFUSED = "refused"
    STRICT = "refused, though the second proof finds it right"
    RIGHT = "accepted and right"
    FAULT = "FAULT"


@dataclass(slots=True)
class Tally:
    """How many ended how, the rules that refused, and the faults with their plans."""

    outcomes: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    strict: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[str, str]] = field(default_factory=list)


@lru_cache(maxsize=4096)
def base(name: str, pattern: str, cp: int, *, layer: bool, direction: Direction) -> Plan | None:
    """A right plan to change; None where the strategy cannot do it."""
    heads = (4, 2) if cp % 2 else (6, 2)
    problem = Problem(
        pattern=make_pattern(pattern, 11),
        heads_q=heads[0],
        heads_kv=heads[1],
        head_dim=4,
        head_dim_v=3,
        batch=1,
        dtype=Dtype.FLOAT64,
        cp=cp,
        hidden=5 if layer else None,
        rotary=1e4 if layer else None,
    )
    try:
        return strategy(name).plan(problem, direction)
    except UnsupportedError:
        return None


def bases(rng: Random) -> Iterator[Plan]:
    """Draw right plans of all strategies, patterns, degrees, directions and scopes."""
    while True:
        name = rng.choice(NAMES)
        whole = name.partition(":")[0] in LAYER_STRATEGIES or any(o in name for o in LAYERED)
        layer = whole or rng.random() < 0.25
        cp = rng.choice((1, 2, 2, 3, 4))
        found = base(
            name, rng.choice(PATTERNS), cp, layer=layer, direction=rng.choice(list(Direction))
        )
        if found is not None:
            yield found


def hunt(count: int, seed: int, kinds: int | None = None, *, both: bool = True) -> Tally:
    """Change plans `count` times.

    Args:
        count: How often.
        seed: Equal seeds change equal plans alike.
        kinds: How many right plans are drawn to be changed; None: one for each change.
        both: The second proof judges refused plans as well, to say which are refused in vain.
    """
    rng, tally = Random(seed), Tally()
    drawn = bases(rng)
    known = None if kinds is None else [next(drawn) for _ in range(kinds)]
    while tally.outcomes.total() < count:
        plan = next(drawn) if known is None else rng.choice(known)
        judge(mutant(plan, rng), tally, both=both)
    return tally


def judge(text: str, tally: Tally, *, both: bool = True) -> None:
    """Judge one plan's text."""
    try:
        plan = from_json(text)
    except ValueError:
        tally.outcomes[Outcome.UNREAD] += 1
        return
    except Exception as error:  # any other is a fault of the reader
        _fault(tally, f"the reader: {error!r}", text)
        return
    try:
        program = verify(plan)
    except PlanError as error:
        right = both and not verdict(plan)
        tally.outcomes[Outcome.STRICT if right else Outcome.REFUSED] += 1
        (tally.strict if right else tally.rules)[error.rule] += 1
        return
    except Exception as error:  # any other is a fault of the verifier
        _fault(tally, f"the verifier: {error!r}", text)
        return
    second = verdict(plan)
    if second:
        _fault(tally, f"proved, but by the second proof: {second}", text)
        return
    try:
        reason = off(program)
        ledger(program)
        if len(text) % 3 == 0:
            reason = reason or unwritten(plan)
    except Exception as error:  # what is proved must run
        reason = f"the executor: {error!r}"
    if reason:
        _fault(tally, reason, text)
    else:
        tally.outcomes[Outcome.RIGHT] += 1


def _fault(tally: Tally, reason: str, text: str) -> None:
    tally.outcomes[Outcome.FAULT] += 1
    tally.faults.append((reason, text))


def off(program: Program) -> str:
    """Run a proved plan and say which of its results is not the truth."""
    plan = program.plan
    known = truth(plan.problem)
    with poisoned():
        inputs = initial_inputs(plan, known, range(plan.problem.cp))
        run = execute(program, inputs, LocalTransport(plan.problem.cp))
    return _compared(plan, run, known)


def unwritten(plan: Plan) -> str:
    """Run a right plan in bfloat16, whose sums begin otherwise; say where it reads garbage."""
    narrow = replace(plan, problem=replace(plan.problem, dtype=Dtype.BFLOAT16))
    known = truth(narrow.problem)
    program = verify(narrow)
    with poisoned():
        given = {
            tensor: value.to(torch.float32 if is_accumulated(tensor) else torch.bfloat16)
            for tensor, value in known.items()
        }
        inputs = initial_inputs(narrow, given, range(narrow.problem.cp))
        run = execute(program, inputs, LocalTransport(narrow.problem.cp))
    ledger(program)
    for resident, value in run.results.items():
        if torch.isnan(value).any():
            return f"{resident.piece} of rank {resident.place.rank} is not a number in bfloat16"
    return ""


def _compared(plan: Plan, run: Run, known: dict[Tensor, torch.Tensor]) -> str:
    sums: dict[Tensor, torch.Tensor] = {}
    for resident in (*plan.outputs, *plan.saved):
        piece, value = resident.piece, run.results[resident]
        if not piece.tensor.is_part:
            wrong = _differs(value, _slice(plan, known[piece.tensor], piece))
            if wrong:
                return f"{piece} of rank {resident.place.rank} {wrong}"
    for resident in plan.outputs:
        piece = resident.piece
        if piece.tensor.is_part:
            whole = known[Tensor(piece.tensor.value.removesuffix("_part"))]
            total = sums.setdefault(piece.tensor, torch.zeros_like(whole))
            total[:, list(members(piece.heads))] += run.results[resident]
    for tensor, total in sums.items():
        wrong = _differs(total, known[Tensor(tensor.value.removesuffix("_part"))])
        if wrong:
            return f"the sum of {tensor} {wrong}"
    return ""


def _slice(plan: Plan, whole: torch.Tensor, piece: Piece) -> torch.Tensor:
    positions = [at for chunk in plan.chunks(piece) for at in chunk]
    return whole[:, list(members(piece.heads))][:, :, positions]


def _differs(value: torch.Tensor, wanted: torch.Tensor) -> str:
    if value.shape != wanted.shape:
        return f"has the shape {tuple(value.shape)}, not {tuple(wanted.shape)}"
    empty = torch.isneginf(wanted)
    if not torch.equal(torch.isneginf(value), empty):
        return "has other rows that see nothing"
    gap = (value - wanted)[~empty].abs()
    scale = wanted[~empty].abs().max() if gap.numel() else torch.tensor(1.0)
    worst = float(gap.max() / scale.clamp(min=1.0)) if gap.numel() else 0.0
    return "" if worst <= FLOAT64 else f"is off by {worst:.2e}"  # false of NaN as well


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill what torch leaves uninitialised with NaN, so that reading it shows."""

    def full_of_nan(make: Any) -> Any:  # noqa: ANN401  # a function of torch
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
            tensor: torch.Tensor = make(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return made

    with (
        mock.patch.object(torch, "empty", full_of_nan(torch.empty)),
        mock.patch.object(torch, "empty_like", full_of_nan(torch.empty_like)),
        mock.patch.object(torch.Tensor, "new_empty", full_of_nan(torch.Tensor.new_empty)),
    ):
        yield


def all_bases() -> Iterator[Plan]:
    """Every right plan that `bases` may draw."""
    for name, pattern, cp, layer, direction in product(
        NAMES, PATTERNS, (1, 2, 3, 4), (False, True), Direction
    ):
        whole = name.partition(":")[0] in LAYER_STRATEGIES or any(o in name for o in LAYERED)
        if layer or not whole:
            found = base(name, pattern, cp, layer=layer, direction=direction)
            if found is not None:
                yield found
