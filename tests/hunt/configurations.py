"""Judge random configurations: each must be right beside a dense reference, or be refused.

The reference shares nothing with the code under test: masks are loops over positions, attention is
a softmax in float64, gradients are autograd's.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

import torch

from harness.attention.all_ranks import run_all
from harness.errors import UnsupportedError
from harness.plan.problem import Dtype, Problem
from harness.planning.options import options_of
from harness.planning.strategy import Context
from patterns import make_pattern
from strategies import STRATEGIES, quick
from tests.hunt.campaign import FLOAT64, poisoned
from tests.hunt.definitions import Drawn, cross, self_attention
from tests.hunt.rendezvous import in_threads


class Verdict(StrEnum):
    """How a configuration ended."""

    RIGHT = "right"
    REFUSED = "refused"
    FAULT = "FAULT"


@dataclass(frozen=True, slots=True)
class Drawing:
    """A configuration, as it would be typed."""

    strategy: str
    pattern: Drawn
    seqlen: tuple[int, int]
    heads: tuple[int, int]
    width: tuple[int, int]
    batch: int
    cp: int
    context: Context


@dataclass(slots=True)
class Count:
    """How many ended how, and the faults in words."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    by_strategy: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def drawn(draw: Random) -> Drawing:
    """Draw a configuration; no two of its sizes need to divide one another."""
    queries = draw.randint(3, 47)
    keys = queries if draw.random() < 0.8 else draw.randint(3, 47)
    pattern = self_attention(draw, queries) if keys == queries else cross(draw, queries, keys)
    kv, group = draw.randint(1, 4), draw.randint(1, 3)
    cp = draw.choice((1, 2, 2, 3, 3, 4, 4, 5, 6, 8))
    nodes = [n for n in range(1, cp + 1) if cp % n == 0]
    return Drawing(
        strategy=_strategy(draw),
        pattern=pattern,
        seqlen=(queries, keys),
        heads=(kv * group, kv),
        width=(draw.randint(1, 9), draw.randint(1, 9)),
        batch=draw.randint(1, 2),
        cp=cp,
        context=Context(gpus_per_node=cp // draw.choice(nodes)),
    )


def _strategy(draw: Random) -> str:
    """Draw a strategy, half the time with one or two options at random values."""
    name = draw.choice(list(STRATEGIES))
    if STRATEGIES[name].report is not None:
        return quick(name)
    known = options_of(STRATEGIES[name].defaults)
    picked = draw.sample(list(known), min(len(known), draw.choice((0, 0, 1, 2))))
    given = ",".join(f"{option}={_value(draw, known[option].reader.values)}" for option in picked)
    return f"{name}:{given}" if given else name


def _value(draw: Random, values: str) -> str:
    if values == "a whole number":
        return str(draw.randint(1, 6))
    return draw.choice(values.split(" or "))


def judged(drawing: Drawing, seed: int, *, synchronous: bool) -> tuple[Verdict, str]:
    """Run one configuration forward and backward beside the reference."""
    try:
        problem = _problem(drawing)
        given = _inputs(drawing, seed)
        with poisoned():
            found = _results(drawing, problem, given, synchronous=synchronous)
    except (UnsupportedError, ValueError) as error:
        return Verdict.REFUSED, str(error)
    except Exception as error:  # whatever it is, it is the find
        return Verdict.FAULT, f"{type(error).__name__}: {error}"
    wrong = _differences(found, _reference(drawing, given))
    return (Verdict.FAULT, wrong) if wrong else (Verdict.RIGHT, "")


def hunt_configurations(count: int, seed: int, *, synchronous: bool = False) -> Count:
    """Judge so many configurations."""
    draw, tally = Random(seed), Count()
    for number in range(count):
        drawing = drawn(draw)
        verdict, why = judged(drawing, number, synchronous=synchronous)
        tally.verdicts[verdict] += 1
        tally.by_strategy[drawing.strategy.partition(":")[0]] += verdict is Verdict.RIGHT
        if verdict is Verdict.FAULT:
            tally.faults.append(f"{drawing}: {why}")
    return tally


def _problem(drawing: Drawing) -> Problem:
    queries, keys = drawing.seqlen
    return Problem(
        pattern=make_pattern(drawing.pattern.text, queries, keys, cross=queries != keys),
        heads_q=drawing.heads[0],
        heads_kv=drawing.heads[1],
        head_dim=drawing.width[0],
        head_dim_v=drawing.width[1],
        batch=drawing.batch,
        dtype=Dtype.FLOAT64,
        cp=drawing.cp,
    )


def _inputs(drawing: Drawing, seed: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    (queries, keys), (heads, kv), (d_k, d_v) = drawing.seqlen, drawing.heads, drawing.width
    shapes = {
        "q": (heads, queries, d_k),
        "k": (kv, keys, d_k),
        "v": (kv, keys, d_v),
        "dout": (heads, queries, d_v),
    }
    return {
        name: torch.randn(drawing.batch, *shape, generator=rng, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def _reference(drawing: Drawing, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    q, k, v = (given[name].clone().requires_grad_() for name in "qkv")
    allowed = torch.tensor(drawing.pattern.dense(*drawing.seqlen))
    group = drawing.heads[0] // drawing.heads[1]
    wide_k, wide_v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q @ wide_k.mT / drawing.width[0] ** 0.5).masked_fill(~allowed, -torch.inf)
    some = allowed.any(-1)  # a query that sees nothing has the output 0
    safe = torch.where(some[:, None], scores, torch.zeros_like(scores))
    p = torch.softmax(safe, -1) * some[:, None]
    out = p @ wide_v
    out.backward(given["dout"])
    found = {"out": out.detach(), "lse": torch.logsumexp(scores, -1).detach()}
    for name, x in (("dq", q), ("dk", k), ("dv", v)):
        assert x.grad is not None
        found[name] = x.grad
    return found


def _differences(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> str:
    for name, right in wanted.items():
        finite = torch.isfinite(right)
        if found[name].shape != right.shape:
            return f"{name} has the shape {tuple(found[name].shape)}, not {tuple(right.shape)}"
        if not torch.equal(found[name][~finite], right[~finite]):
            return f"{name} has other rows that see nothing"
        gap = (found[name] - right)[finite].abs()
        scale = max(1.0, float(right[finite].abs().max()) if gap.numel() else 1.0)
        if gap.numel() and not float(gap.max()) <= FLOAT64 * scale:
            return f"{name} is off by {float(gap.max()):.2e}"
    return ""


def _results(
    drawing: Drawing,
    problem: Problem,
    given: Mapping[str, torch.Tensor],
    *,
    synchronous: bool,
) -> Mapping[str, torch.Tensor]:
    if synchronous:
        return in_threads(problem, drawing.strategy, drawing.context, given)
    runs = run_all(
        problem,
        drawing.strategy,
        given["q"],
        given["k"],
        given["v"],
        dout=given["dout"],
        context=drawing.context,
    )
    return runs.results
