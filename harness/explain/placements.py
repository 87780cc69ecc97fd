"""All placements of tokens of one strategy side by side, each planned and proved."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from harness.errors import UnsupportedError
from harness.plan import imbalance
from harness.plan.dealing import deal, separate_documents
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Placement
from harness.plan.sizes import traffic
from harness.planning.chosen import Chosen
from harness.planning.options import placement_of
from harness.planning.strategy import Context
from harness.verify.proof import verify
from patterns import make_pattern

_PACK = "documents"
_KEPT = ("mask", "window")  # parameters of a pack that say nothing of its lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One placement of a strategy.

    Attributes:
        strategy: As it is typed, with the chunk that the placement chose.
        imbalance_total: See `imbalance`, forward.
        imbalance_lockstep: As above.
        received_bytes: All ranks together, forward.
        received_bytes_backward: As above, backward.
        received_bytes_most: The rank that receives most, forward.
        seconds: Predicted, forward and backward; None where nothing predicts.
        reason: Why it is not legal; None if it is. Nothing above is known then.
        padded: Whether documents are padded, so that it is another problem than was asked for.
    """

    strategy: str
    imbalance_total: float | None = None
    imbalance_lockstep: float | None = None
    received_bytes: int | None = None
    received_bytes_backward: int | None = None
    received_bytes_most: int | None = None
    seconds: float | None = None
    reason: str | None = None
    padded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DealReach:
    """How near the least possible a deal of chunks comes.

    Attributes:
        chunk: Tokens of a chunk.
        chunks: How many.
        optimality: Least area of the fullest rank, however these chunks are dealt, over what it is.
    """

    chunk: int
    chunks: int
    optimality: float


def placements(
    chosen: Chosen, problem: Problem, context: Context, seconds: Callable[[Plan], float] | None
) -> list[Placed]:
    """Plan and prove a strategy with every placement, and with documents padded as TE pads them.

    Args:
        chosen: A strategy with an option `placement`; its own placement is not looked at.
        problem: The problem.
        context: What its planner may know.
        seconds: From a plan to predicted seconds; None leaves them out.

    Raises:
        ValueError: The strategy deals tokens in one way only.
    """
    if placement_of(chosen.options) is None or not hasattr(chosen.options, "chunk"):
        raise ValueError(
            f"{chosen.text}: it has no options placement and chunk; take a strategy that has"
        )
    rows = [_placed(chosen, placement, problem, context, seconds) for placement in Placement]
    wider = padded_problem(problem)
    if wider is not None:
        row = _placed(chosen, Placement.DOCUMENTS, wider, context, seconds)
        name = f"{row.strategy}, each padded to a multiple of {2 * problem.cp}"
        rows.append(replace(row, strategy=name, padded=True))
    return rows


def padded_problem(problem: Problem) -> Problem | None:
    """Return a pack whose documents are padded to a multiple of 2 cp each.

    Transformer Engine's thd layout needs that (TE#2129); what is added attends and is attended as
    the document is. None where nothing is added, or the pattern is no pack.
    """
    name, _, typed = problem.pattern.text.partition(":")
    if name != _PACK or not padding(problem):
        return None
    unit = 2 * problem.cp
    lengths = [-(-(band.q1 - band.q0) // unit) * unit for band in problem.pattern.bands]
    kept = [each for each in typed.split(",") if each.partition("=")[0] in _KEPT]
    text = ",".join([f"{_PACK}:lengths={'+'.join(map(str, lengths))}", *kept])
    return replace(problem, pattern=make_pattern(text, sum(lengths)))


def _placed(
    chosen: Chosen,
    placement: Placement,
    problem: Problem,
    context: Context,
    seconds: Callable[[Plan], float] | None,
) -> Placed:
    # what was typed is the chunk of the placement that it was typed with
    chunk = chosen.options.chunk if placement is placement_of(chosen.options) else None
    asked = replace(chosen, options=replace(chosen.options, placement=placement, chunk=chunk))
    try:
        plans = [asked.plan(problem, direction, context) for direction in Direction]
        text = asked.resolved(problem, Direction.FORWARD, context).text
    except UnsupportedError as error:
        return Placed(strategy=asked.text, reason=str(error))
    for plan in plans:
        verify(plan)
    received = [traffic(plan)[1] for plan in plans]
    return Placed(
        strategy=text,
        imbalance_total=imbalance.imbalance_total(plans[0]),
        imbalance_lockstep=imbalance.imbalance_lockstep(plans[0]),
        received_bytes=sum(received[0]),
        received_bytes_backward=sum(received[1]),
        received_bytes_most=max(received[0]),
        seconds=None if seconds is None else sum(map(seconds, plans)),
    )


def deal_reach(problem: Problem) -> DealReach:
    """Say what `balanced` reaches over all ranks, with the chunk that it chooses itself."""
    found = deal(problem.pattern, problem.cp, Placement.BALANCED)
    optimality = found.bound / found.most if found.most else 1.0
    return DealReach(chunk=found.chunk, chunks=len(found.areas), optimality=optimality)


def padding(problem: Problem) -> int:
    """Count tokens to add where every document is padded to a multiple of 2 cp.

    Transformer Engine's thd layout needs that; plans here deal documents without it.
    """
    unit = 2 * problem.cp
    return sum(-len(document) % unit for document in separate_documents(problem.pattern))


def fastest_placement(rows: list[Placed]) -> Placed | None:
    """Return the placement that is predicted to be fastest; None where nothing was predicted."""
    timed = [row for row in rows if row.seconds is not None and not row.padded]
    return min(timed, key=lambda row: row.seconds or 0.0, default=None)


def placement_rows(rows: list[Placed]) -> list[tuple[str, ...]]:
    """Spell rows for people: MiB and milliseconds; what is not legal has its reason below."""
    lines = []
    for row in rows:
        known = (row.received_bytes, row.received_bytes_most, row.received_bytes_backward)
        if row.imbalance_total is None or row.imbalance_lockstep is None:
            lines.append((row.strategy, "not legal", *[""] * 5))
            continue
        lines.append(
            (
                row.strategy,
                f"{row.imbalance_total:.3f}",
                f"{row.imbalance_lockstep:.3f}",
                *(f"{(size or 0) / 2**20:.1f}" for size in known),
                "" if row.seconds is None else f"{row.seconds * 1e3:.3f}",
            )
        )
    return lines


def placement_notes(rows: list[Placed], problem: Problem, where: str) -> list[str]:
    """Say which is fastest, what a deal of chunks reaches, what padding would add, and refusals.

    Args:
        rows: As `placements` gave them.
        problem: The problem.
        where: What the seconds are predicted for.
    """
    found, fastest, added = deal_reach(problem), fastest_placement(rows), padding(problem)
    said = [
        f"balanced over {problem.cp} ranks: {found.chunks} chunks of {found.chunk} tokens reach "
        f"{found.optimality:.1%} of the bound on their deal",
        f"documents: no padding here; padded to 2 cp ({2 * problem.cp}) each, as Transformer "
        f"Engine's thd layout needs, they are {added} tokens more ({added / problem.seqlen_q:.1%})",
    ]
    if fastest is not None:
        said.insert(0, f"fastest by prediction on {where}: {fastest.strategy}")
    return said + [row.reason for row in rows if row.reason is not None]
