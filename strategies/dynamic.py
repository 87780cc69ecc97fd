"""Dynamic groups: a short document stays on one rank, a long one gets a group of its own size.

Inside a group a document lies head-tail; its keys are gathered there, or travel a ring of the
group. All groups are one plan and may overlap: ranks with a part of a long document attend short
ones while its keys are on their way.

    documents   a a a a a a a a   b b b b   c c   d d        one letter, one unit of tokens
    rank 0      a0 a7             .         c
    rank 1      a1 a6             .         .     d          a: ranks 0 to 3
    rank 2      a2 a5             b0 b3     .                b: ranks 2 and 3
    rank 3      a3 a4             b1 b2     .                c, d: one rank

`rule=predicted` solves for the groups (`planning.groups.solving`), `rule=megatron` chooses them as
Megatron's scheduler does. One document alone, or keys of another number, is shared by all ranks.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from harness.base.numbers import whole_number
from harness.base.remembered import remembered
from harness.errors import UnsupportedError
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import zigzag
from harness.planning.builder import PlanBuilder, shard_both
from harness.planning.collectives import gather_attention
from harness.planning.groups import choosing
from harness.planning.groups.grouping import Grouping, deal_groups, group_rings
from harness.planning.groups.prices import group_prices
from harness.planning.options import Reader, option
from harness.planning.planned_for import USUAL, machine_of
from harness.planning.rings import cycle, rings_attention
from harness.planning.strategy import Checks, Context, Strategy

_SOLVED = "solved"  # sizes of groups that nobody gave
_ROOM = 2  # times the even share of tokens


class Rule(StrEnum):
    """Who chooses groups."""

    PREDICTED = "predicted"
    MEGATRON = "megatron"


class Inner(StrEnum):
    """How the ranks of a group share documents."""

    ALLGATHER = "allgather"
    RING = "ring"


def _sizes(value: str) -> str:
    sizes = value.split("+")
    return value if value == _SOLVED else "+".join(str(whole_number(size)) for size in sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the strategy."""

    rule: Rule = option(Rule.PREDICTED, "by predicted time, or as Megatron's scheduler chooses")
    inner: Inner = option(Inner.ALLGATHER, "inside a group: keys are gathered, or travel a ring")
    most: int | None = option(
        None,
        "tokens of a rank, at most; rule=megatron: of one document on a rank",
        unset="twice the even share; rule=megatron: the even share",
    )
    groups: str = option(
        _SOLVED,
        "sizes of groups that divide the ranks in this order",
        reader=Reader(_sizes, f"{_SOLVED} or whole numbers joined by +"),
    )


def plan(
    problem: Problem, direction: Direction, options: Options, context: Context, name: str
) -> Plan:
    """Plan all groups; legal for every problem.

    Raises:
        UnsupportedError: Sizes of groups do not sum to the ranks, or tokens do not fit.
    """
    filled = resolve(problem, direction, options, context)
    groups = _groups(replace(problem, **USUAL), filled, context)
    return _plan(problem, direction, options.inner, name, groups, context.align)


def resolve(problem: Problem, direction: Direction, options: Options, context: Context) -> Options:
    """Fill in the limit of tokens."""
    del direction, context
    if options.groups != _SOLVED and options.rule is Rule.MEGATRON:
        reason = f"dynamic: groups ({options.groups}) only apply to rule=predicted"
        raise UnsupportedError(reason, (f"dynamic:groups={options.groups}",))
    room = 1 if options.rule is Rule.MEGATRON else _ROOM
    return replace(options, most=options.most or room * choosing.even_share(problem))


def _plan(
    problem: Problem,
    direction: Direction,
    inner: Inner,
    name: str,
    groups: Grouping,
    align: int = 1,
) -> Plan:
    if problem.seqlen_q == problem.seqlen_kv:
        queries = keys = deal_groups(groups, problem.cp)
    else:
        queries, keys = shard_both(problem, zigzag)
    b = PlanBuilder(problem, name, direction, queries, keys, align=align)
    if inner is Inner.ALLGATHER:
        gather_attention(b)
    elif queries is keys:
        rings_attention(b, group_rings(b, groups))
    else:
        rings_attention(b, [cycle(b, range(problem.cp))])
    return b.build()


@remembered  # both directions, and whoever deals tokens, ask for the same
def _groups(problem: Problem, options: Options, context: Context) -> Grouping:
    """Choose groups, whatever the precision and width of a call."""
    most = options.most or choosing.even_share(problem)
    prices, evaluate = group_prices(machine_of(problem, context), problem), context.evaluate

    def clock(groups: Grouping) -> float:
        assert evaluate is not None
        return sum(evaluate(_plan(problem, way, options.inner, "", groups)) for way in Direction)

    try:
        if options.rule is Rule.MEGATRON:
            return choosing.scheduled_groups(problem, most)
        if options.groups != _SOLVED:
            sizes = [int(part) for part in options.groups.split("+")]
            return choosing.sized_groups(problem, most, prices, sizes)
        return choosing.predicted_groups(problem, most, prices, clock if evaluate else None)
    except UnsupportedError as error:
        raise UnsupportedError(f"dynamic: {error.reason}", error.nearest) from None


STRATEGY = Strategy(
    name="dynamic",
    summary="long documents get groups of ranks of their size, short ones stay on one",
    paper="Megatron-LM, --dynamic-context-parallel; ByteScale, arXiv:2502.21231; FlexSP, "
    "arXiv:2412.01523",
    plan=plan,
    defaults=Options(),
    resolve=resolve,
    timed=True,
    compared=("rule=megatron", "inner=ring"),
    checks=Checks(options=("rule=megatron", "inner=ring")),
)
