"""UltraAttn: which rank computes which block is solved for, level by level.

    remap      order the blocks of the sequence so that few others are needed
    node       give blocks of a coarse grid to nodes: largest traffic least, loads capped
    device     give the pieces of each block to the node's GPUs, likewise
    kernel     fuse tiles and transfers where the whole plan gains
    schedule   order what each stream does

    four ranks, first column and diagonal: 4 chunks for the busiest rank, 6 at the rows' owners

    1 . . .
    2 1 . .        block (i, j) is at the rank shown; rows and columns are owned in order
    2 . 3 .
    4 . . 4

`ultraattn-paper` plans as the public code does (see `PlanningMode.published`).
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from harness.base.remembered import remembered
from harness.errors import UnsupportedError
from harness.plan.plan import Plan, to_json
from harness.plan.problem import Direction, Problem
from harness.plan.reader import from_json
from harness.planning.levels import Level, read_levels, spell_levels
from harness.planning.options import GIB, SECONDS, Reader, option
from harness.planning.planned_for import MADE_FOR, USUAL, machine_of
from harness.planning.strategy import Context, Strategy
from harness.schedule.within_memory import CappedPlan
from strategies.ultraattn.fallbacks import or_others
from strategies.ultraattn.finish import Plans, ReportedPlan, seconds_of
from strategies.ultraattn.memory_cap import kept_cap, plan_within
from strategies.ultraattn.plan_store import Kept, kept, plan_key
from strategies.ultraattn.planner import plan_both
from strategies.ultraattn.planning import PlanningMode
from strategies.ultraattn.selection import Favour

PAPER = "UltraAttn (SC'25): Efficiently Parallelizing Attention through Hierarchical Context-Tiling"

NAMES = ("ultraattn", "ultraattn-paper")
"""The planner's own rules, then those of the public code."""
_SEARCHES = "%s: searches for plans on %d ranks, at most %g s for each of %s%s"
_MANY = 32  # from this many ranks on, steps other than the search take the most time


def _levels(value: str) -> str:
    return spell_levels(read_levels(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Options of the search."""

    levels: str = option(
        "all",
        f"levels to plan: {', '.join(Level)}",
        reader=Reader(_levels, "all or none or names joined by +"),
    )
    seconds: float = option(2.0, "processor time for each distinct tiling, s", reader=SECONDS)
    prove: bool = option(False, "search until optimality is proved, at most a minute per tiling")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Search):
    """Options of the strategy."""

    candidates: bool = option(False, "use another strategy's plan where that is faster")
    favour: Favour = option(Favour.BOTH, "direction that counts where both share one placement")
    memory: float | None = option(
        None,
        f"most that a rank may hold, GiB ({MADE_FOR})",
        unset="no cap",
        reader=GIB,
    )


def plan(
    problem: Problem, direction: Direction, options: Options, context: Context, name: str
) -> Plan:
    """Plan all levels that are on; legal for every problem."""
    made = _reported(problem, direction, options, context)
    return replace(made.plan, problem=problem, strategy=name)


def plan_published(
    problem: Problem, direction: Direction, options: Search, context: Context, name: str
) -> Plan:
    """Plan as the public code does; legal for every problem."""
    mode = replace(_mode(options), published=True)
    return replace(_both(problem, mode, context, False)[direction].plan, strategy=name)


def report(
    problem: Problem, direction: Direction, options: Options, context: Context
) -> Mapping[str, Any]:
    """Return the results of each level of the plan."""
    made = _reported(problem, direction, options, context)
    return _said(problem, made, _mode(options), context)


def report_published(
    problem: Problem, direction: Direction, options: Search, context: Context
) -> Mapping[str, Any]:
    """Return the results of each level of the published kind of plan."""
    mode = replace(_mode(options), published=True)
    return _said(problem, _both(problem, mode, context, False)[direction], mode, context)


def _reported(
    problem: Problem, direction: Direction, options: Options, context: Context
) -> ReportedPlan:
    mode = _mode(options)
    if options.memory is None:
        return _both(problem, mode, context, options.candidates)[direction]
    bare = replace(problem, **USUAL)  # so that the places of tokens depend on nothing else
    found = _capped(bare, mode, context, options.candidates, options.memory)[direction]
    return kept_cap(found, options.memory, MADE_FOR)


@remembered
def _capped(
    problem: Problem, mode: PlanningMode, context: Context, candidates: bool, memory: float
) -> Mapping[Direction, ReportedPlan | CappedPlan]:
    if context.peak_bytes is None:
        raise UnsupportedError(
            f"ultraattn: memory ({memory:g} GiB) must be planned for a cluster that is known",
            ("no memory=",),
        )

    def plans_of(each: PlanningMode) -> Plans:
        return _both(problem, each, context, candidates)

    return plan_within(mode, memory, plans_of, context.peak_bytes)


def _said(
    problem: Problem, made: ReportedPlan, mode: PlanningMode, context: Context
) -> Mapping[str, Any]:
    machine = machine_of(problem, context)
    return {
        **made.report,
        "on": spell_levels(mode.levels),
        "cluster": machine.name,
        "gpus_per_node": context.gpus_per_node,
        "calibrated": machine.fitted is not None,
        "made_for": MADE_FOR,
    }


def _searched(mode: PlanningMode) -> str:
    """Say what is searched, and about how many of each; nothing if no level that does is on."""
    number = "a few" if mode.published else "some ten"
    levels = {"tilings": {Level.NODE, Level.DEVICE}, "schedules": {Level.SCHEDULE}}
    return " and ".join(f"{number} {name}" for name, each in levels.items() if each & mode.levels)


def _mode(options: Search) -> PlanningMode:
    return PlanningMode(
        levels=read_levels(options.levels),
        seconds=options.seconds,
        prove=options.prove,
        favour=options.favour if isinstance(options, Options) else Favour.BOTH,
    )


@remembered  # so that both directions share one search even where no cache can be written
def _both(problem: Problem, mode: PlanningMode, context: Context, candidates: bool) -> Plans:
    """Return both directions' plans, from the cache or else made and stored.

    Tokens are dealt to ranks before anybody knows the precision, width and batch of a call, and
    whether it is a layer's; so plans must not depend on them, and are made for `USUAL` ones.
    """
    bare = replace(problem, **USUAL)
    name, compared = NAMES[mode.published], candidates and context.others is not None

    def make() -> Kept:
        if compared and context.others is not None:
            own = _both(bare, mode, context, candidates=False)
            judge = context.evaluate or partial(seconds_of, machine_of(bare, context))
            found = or_others(bare, own, context.rivals(bare.cp), context.others, judge)
        else:
            what = _searched(mode)
            if what:
                rest = (
                    "; at this many ranks that takes half a minute or more"
                    if bare.cp > _MANY
                    else ""
                )
                told = (name, bare.cp, mode.seconds, what, rest)
                logging.getLogger(__name__).info(_SEARCHES, *told)
            found = plan_both(bare, mode, context)
        return {
            direction.value: {"plan": to_json(each.plan), "report": each.report}
            for direction, each in found.items()
        }

    key = plan_key(
        problem=bare,
        bands=problem.pattern.bands,
        mode=mode,
        gpus_per_node=context.gpus_per_node,
        cluster=context.cluster,
        candidates=compared,
        **({} if context.align == 1 else {"align": context.align}),
    )

    def read(both: Kept) -> Plans:
        return {
            direction: ReportedPlan(plan=from_json(each["plan"], problem), report=each["report"])
            for direction in Direction
            for each in (both[direction.value],)
        }

    return kept(f"{name}:candidates=true" if compared else name, key, make, read)


STRATEGY = Strategy(
    name=NAMES[False],
    summary="solves for which rank computes each block",
    paper=PAPER,
    plan=plan,
    report=report,
    defaults=Options(),
)

PUBLISHED = Strategy(
    name=NAMES[True],
    summary="the same, planned as its public code does",
    paper=PAPER,
    plan=plan_published,
    report=report_published,
    defaults=Search(),
)
