"""Plans whose lengths are left open: planned once at a small size, priced at any.

Two problems that differ only in the number of tokens have the same tasks if the pattern scales with
them: full, causal, and tables of blocks do, a window of so many tokens does not. Times, bytes and
memory at a larger size then follow from the small plan, exactly but for diagonals, whose share of
an area is larger in a small plan: by less than 0.1 % at 1024 tokens a chunk.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.cluster.calibration import Calibration
from harness.cluster.machine import LinkClass, link_between
from harness.memory.ledger import peaks
from harness.plan.dealing import DEALT
from harness.plan.imbalance import imbalance_lockstep, imbalance_total
from harness.plan.plan import Plan
from harness.plan.residency import Program
from harness.plan.sizes import leg_bytes, traffic
from harness.plan.tasks import Scope, legs_of
from harness.planning.options import placement_of
from harness.records.config import Config
from harness.simulate.calibrated import skeleton_on
from harness.simulate.jobs import Skeleton
from patterns import make_pattern
from patterns.pattern import Pattern
from strategies import strategy

_PER_RANK = 2048
"""Tokens of a rank of the small plan: a zigzag has two chunks of 1024."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """A planned, proved problem.

    Attributes:
        shape: Its jobs, folded.
        plan_hash: Of the plan.
        work_hash: Of the plan, whatever its strategy's name.
        tokens: Query tokens that were planned.
        peak_bytes: Largest peak of a rank, by the ledger.
        peak_bytes_algorithm: The same of what the algorithm needs, see `counting.ALGORITHM`.
        sent_bytes: Most that a rank sends to others.
        link_bytes: By class of link, bytes that cross it.
        imbalance: See `plan.imbalance.imbalance_total`.
        imbalance_lockstep: See `plan.imbalance.imbalance_lockstep`.
    """

    shape: Skeleton
    plan_hash: str
    work_hash: str
    tokens: int
    peak_bytes: int
    peak_bytes_algorithm: int
    sent_bytes: int
    link_bytes: Mapping[str, int]
    imbalance: float
    imbalance_lockstep: float

    def at(self, tokens: int) -> "Structure":
        """The same plan at other lengths; its skeleton stays as it is.

        Raises:
            ValueError: `tokens` is neither a multiple nor a divisor of the planned tokens.
        """
        if max(tokens, self.tokens) % min(tokens, self.tokens):
            raise ValueError(
                f"tokens ({tokens}) must be a multiple or a divisor of the {self.tokens} planned"
            )

        def scaled(size: int) -> int:
            # Every chunk was cut evenly, so bytes divide as tokens do.
            return size * tokens // self.tokens

        return replace(
            self,
            peak_bytes=scaled(self.peak_bytes),
            peak_bytes_algorithm=scaled(self.peak_bytes_algorithm),
            sent_bytes=scaled(self.sent_bytes),
            link_bytes={name: scaled(size) for name, size in self.link_bytes.items()},
        )


def structure(
    program: Program, fitted: Calibration, *, eager: bool, fold: bool = True
) -> Structure:
    """Take a proved plan apart."""
    plan = program.plan
    sent, _ = traffic(plan)
    held, needed = peaks(program)
    return Structure(
        shape=skeleton_on(program, fitted, eager=eager, fold=fold),
        plan_hash=plan.hash,
        work_hash=plan.work_hash,
        tokens=plan.problem.seqlen_q,
        peak_bytes=held,
        peak_bytes_algorithm=needed,
        sent_bytes=max(sent),
        link_bytes=_link_bytes(plan, fitted.hardware.gpus_per_node),
        imbalance=imbalance_total(plan),
        imbalance_lockstep=imbalance_lockstep(plan),
    )


def _link_bytes(plan: Plan, gpus_per_node: int) -> dict[str, int]:
    total: dict[str, int] = {}
    for task in plan.tasks:
        for leg in legs_of(task):
            link = link_between(leg.src, leg.dst, gpus_per_node)
            if link is not LinkClass.LOCAL:
                total[link.value] = total.get(link.value, 0) + leg_bytes(plan, leg)
    return total


def planned_at(config: Config) -> Config:
    """The cell that is planned for another: at one length per rank, if its pattern scales.

    Else it is the cell itself. Weights of a layer do not scale, nor does anything that is cut into
    parts of fixed length, as chunks that are dealt by their work may be. A shorter cell shares the
    plan down to a fourth of its length.
    """
    if config.scope is Scope.LAYER or config.seqlen_q != config.seqlen_kv or searches(config):
        return config
    if placement_of(strategy(config.strategy).options) in DEALT:
        return config
    tokens = config.cp * _PER_RANK
    shorter = config.seqlen_q in (tokens // 2, tokens // 4)
    if config.seqlen_q == tokens or (config.seqlen_q % tokens and not shorter):
        return config
    pattern = make_pattern(config.pattern, config.seqlen_q)
    other = make_pattern(config.pattern, tokens)
    small, large = (pattern, other) if shorter else (other, pattern)
    if not _scales(small, large):
        return config
    return replace(config, seqlen_q=tokens, seqlen_kv=tokens)


def searches(config: Config) -> bool:
    """Whether the strategy times its choices, so that its plan depends on lengths and speeds."""
    chosen = strategy(config.strategy)
    asked = chosen.strategy
    weighs = asked.weighs is not None and asked.weighs(chosen.options)
    return asked.timed or asked.report is not None or weighs


def _scales(small: Pattern, large: Pattern) -> bool:
    factor = large.seqlen_q // small.seqlen_q
    if len(small.bands) != len(large.bands) or small.text != large.text:
        return False
    return all(
        (b.q0, b.q1, b.k0, b.k1) == (a.q0 * factor, a.q1 * factor, a.k0 * factor, a.k1 * factor)
        and [_times(bound, factor) for bound in (a.lo, a.hi)] == [b.lo, b.hi]
        for a, b in zip(small.bands, large.bands, strict=True)
    )


def _times(bound: int | None, factor: int) -> int | None:
    return None if bound is None else bound * factor
