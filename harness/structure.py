"""What a plan is whatever its lengths: planned once at a small size, priced at any.

Two problems that differ only in the number of tokens have the same tasks if the pattern scales with
them: full, causal, and tables of blocks do, a window of so many tokens does not. Times, bytes and
memory at a larger size then follow from the small plan, exactly but for diagonals, whose share of
an area is larger in a small plan: by less than 0.1 % at 1024 tokens a chunk.

Structures are kept in a folder, by a hash of the problem and of the code that plans, so a sweep
need not plan again what an earlier one has planned.
"""

import hashlib
import pickle
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from harness.balance import imbalance_lockstep, imbalance_total
from harness.caching import code_hash
from harness.calibration import Calibration
from harness.cluster import Runtime, cluster
from harness.config import Config
from harness.contexts import context_on
from harness.files import write_whole
from harness.memory import peaks
from harness.plan import Plan, Scope, legs_of
from harness.predicted import skeleton_on
from harness.residency import Program
from harness.sizes import leg_bytes, traffic
from harness.skeleton import Skeleton
from harness.strategy import Context
from harness.verify import verify
from patterns import make_pattern
from patterns.pattern import Pattern
from strategies import strategy

_PER_RANK = 2048
"""Tokens of a rank of the small plan: a zigzag has two chunks of 1024."""
_KEPT = 2
"""Folders of structures, one per state of the code, that stay."""


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
        imbalance: See `balance.imbalance_total`.
        imbalance_lockstep: See `balance.imbalance_lockstep`.
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
            ValueError: `tokens` is no multiple of what was planned.
        """
        scale, rest = divmod(tokens, self.tokens)
        if rest:
            raise ValueError(f"tokens ({tokens}) must be a multiple of the {self.tokens} planned")
        return replace(
            self,
            peak_bytes=self.peak_bytes * scale,
            peak_bytes_algorithm=self.peak_bytes_algorithm * scale,
            sent_bytes=self.sent_bytes * scale,
            link_bytes={name: size * scale for name, size in self.link_bytes.items()},
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
            if leg.src == leg.dst:
                continue
            a, b = leg.src.rank, leg.dst.rank
            near = "nvlink" if a // gpus_per_node == b // gpus_per_node else "nic"
            name = "host" if a == b else near
            total[name] = total.get(name, 0) + leg_bytes(plan, leg)
    return total


def planned_at(config: Config) -> Config:
    """The cell that is planned for another: at fewer tokens, if its pattern scales; else itself.

    Weights of a layer do not scale, nor does anything that is cut into parts of fixed length.
    """
    if config.scope is Scope.LAYER or config.seqlen_q != config.seqlen_kv or searches(config):
        return config
    tokens = config.cp * _PER_RANK
    if config.seqlen_q % tokens or config.seqlen_q == tokens:
        return config
    pattern = make_pattern(config.pattern, config.seqlen_q)
    if not _scales(make_pattern(config.pattern, tokens), pattern):
        return config
    return replace(config, seqlen_q=tokens, seqlen_kv=tokens)


def searches(config: Config) -> bool:
    """Whether the strategy times its choices, so that its plan depends on lengths and speeds."""
    return strategy(config.strategy).strategy.report is not None


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


def structure_of(config: Config, fitted: Calibration, folder: Path | None) -> Structure:
    """Plan and prove a cell, or read what an earlier run made of it.

    Args:
        config: As `planned_at` gave it.
        fitted: Its cluster.
        folder: Where structures are kept; None keeps none.

    Raises:
        UnsupportedError: The strategy cannot do this problem.
    """
    path = None if folder is None else folder / code_hash() / f"{_key(config, fitted)}.pickle"
    if path is not None and (kept := _read(path)) is not None:
        return kept
    context = Context(gpus_per_node=fitted.hardware.gpus_per_node)
    if searches(config) and config.cluster is not None:
        context = context_on(cluster(config.cluster))
    plan = strategy(config.strategy).plan(config.problem, config.direction, context)
    made = structure(verify(plan), fitted, eager=config.runtime is Runtime.EAGER)
    if path is not None:
        _write(path, made)
    return made


def _key(config: Config, fitted: Calibration) -> str:
    """Of all that decides a structure: for most strategies not the cluster's speeds."""
    place = (fitted.hardware.gpus_per_node, fitted.on_gpus)
    plain = config if searches(config) else replace(config, cluster=None)
    return hashlib.sha256(repr((plain.hash, place)).encode()).hexdigest()[:24]


def _read(path: Path) -> Structure | None:
    """What is there; None if nothing can be read."""
    try:
        kept = pickle.loads(zlib.decompress(path.read_bytes()))  # the user's own cache
    except (OSError, zlib.error, pickle.PickleError, EOFError, AttributeError, TypeError):
        return None
    return kept if isinstance(kept, Structure) else None


def _write(path: Path, made: Structure) -> None:
    """Keep a structure, whole or not at all; a full disk is no failure."""
    with suppress(OSError):
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _forget(path.parent.parent)
        write_whole(path, zlib.compress(pickle.dumps(made, protocol=5), 1))


def _forget(folder: Path) -> None:
    """Drop the structures of all but the newest states of the code."""
    states = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for state in states[_KEPT:]:
        for path in state.iterdir():
            path.unlink(missing_ok=True)
        state.rmdir()
