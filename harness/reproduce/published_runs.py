"""Measured runs of published harnesses: which plan each row is, and what the predictor says.

Rows come from tables with the columns of `measured_dist_attn.csv` and `measured_bsa_h100.csv`. What
no strategy here plans, and what is known to be wrong or only noise, is skipped with its reason.

    ultra, manual, one node        grid:rows=Y, as a queue launched ahead; fused by collectives
    ultra, manual, several nodes   grid:rows=Y of nodes, each tile the best grid inside a node
    ultra, node_tile               every block at the owner of its row; where a pattern joins nodes,
                                   in the node that the level `node` of ultraattn gives it
    ultra, device_tile             the plan of ultraattn here against theirs, whose ties are unknown
    ring, zigzag, stripe           the strategy of that name in eager torch
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from harness.cluster.calibration import Calibration
from harness.cluster.effects import ALL, Effect
from harness.plan.dependencies import rebuilt
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.sharding import Sharding, split
from harness.planning.block_assignment import row_owner
from harness.planning.block_transfers import plan_allocation
from harness.planning.strategy import Context
from harness.proved.plans import proved
from harness.simulate.job_costs import TORCH, ULTRA, Convention, Pricer
from harness.simulate.job_graph import skeleton
from harness.simulate.jobs import Skeleton
from harness.simulate.tile_calls import TimedCall
from harness.verify.proof import verify
from patterns import make_pattern
from patterns.pattern import Pattern
from patterns.table import TableMask, table_bands
from strategies import strategy

PublishedRow = Mapping[str, str]

CALIBRATION_OF_GPU = {"H800": "h800", "A800": "a800", "A100": "a100", "H100": "h100-hamming"}
"""Calibration of each GPU label of the tables."""

_EAGER = ("ring", "zigzag", "stripe")
_SEARCH_S = 1  # CPU seconds per tiling and per schedule of ultraattn
_PER_CHUNK = 1024  # tokens of the reference problem
_RAW = {"strided": 16, "global_local": 16, "star": 4, "streaming": 8}  # Source: UltraAttn, tables
_HEAD_DIM = 128
_MOST_GPUS = 1024  # a ring of so many is planned in a minute
_MOST_SEARCHED = 64  # others take long to search or to lay out
_DENSE = ("full", "causal")
_MODES = ("normal", "nocomm", "nocomp")
_PAIRED_NODES = 8  # of so many a strided pattern joins pairs; fewer it keeps apart
_OWNER_NODES = (1, 2, 4, _PAIRED_NODES)
_NOISE_S = 0.3e-3  # below it measured times of this harness repeat only within 14 %


@dataclass(frozen=True, slots=True)
class Case:
    """The configuration that a row measures.

    Attributes:
        gpu: Label of the GPU model.
        nodes: How many.
        gpus_per_node: GPUs of a node.
        pattern: Who attends whom.
        direction: `fwd` or `bwd`.
        strategy: Label of the plan.
        heads: Query heads, of all sequences of a batch.
        seqlen_q: Query tokens.
        seqlen_kv: Key tokens.
        rows: Y of a grid, else 0.
        mode: `normal`, `nocomm` or `nocomp`.
        measured_s: The measured time.
        author_s: The authors' own prediction, if known.
        levels: Of a plan of `ultraattn`, which of its levels.
    """

    gpu: str
    nodes: int
    gpus_per_node: int
    pattern: str
    direction: str
    strategy: str
    heads: int
    seqlen_q: int
    seqlen_kv: int
    rows: int
    mode: str
    measured_s: float
    author_s: float | None
    levels: str = ""

    @property
    def cp(self) -> int:
        """Ranks."""
        return self.nodes * self.gpus_per_node

    @property
    def pass_(self) -> Direction:
        """Direction of the plan."""
        return Direction.FORWARD if self.direction == "fwd" else Direction.BACKWARD

    @property
    def noisy(self) -> bool:
        """Whether the time is too short to repeat."""
        return not self.is_eager and self.measured_s < _NOISE_S

    @property
    def is_eager(self) -> bool:
        """Whether it is a baseline in eager torch."""
        return self.strategy in _EAGER


def case_of(row: PublishedRow) -> Case | str:
    """Read a row; a text says why it is skipped."""
    if row["gpu"] not in CALIBRATION_OF_GPU:
        gpu = row["gpu"] or "(none)"
        return f"there is no calibration of {gpu}; there is one of {', '.join(CALIBRATION_OF_GPU)}"
    if row["strategy"] not in ("ultra", *_EAGER):
        known = ", ".join(("ultra", *_EAGER))
        return f"strategy {row['strategy'] or '(none)'} does not exist here; {known} do"
    try:
        case = _sparse(row) if "author_predicted_s" in row else _dense(row)
    except KeyError as error:
        return f"the row cannot be read: it has no column {error}"
    except TypeError:
        return "the row cannot be read: it ends before its last column"
    except ValueError as error:
        return f"the row cannot be read: {type(error).__name__}: {error}"
    return case if isinstance(case, str) else _refused(case) or case


def _refused(case: Case) -> str:
    """Reason why a row is inconsistent or cannot be planned; empty if it can."""
    counts = (case.seqlen_q, case.seqlen_kv, case.heads, case.nodes, case.gpus_per_node)
    if not (0 < case.measured_s < math.inf) or min(counts) <= 0:
        return "the row cannot be read: times, lengths, heads and GPUs must be positive and finite"
    named = (
        ("direction", case.direction, ("fwd", "bwd")),
        ("mode", case.mode, _MODES),
        ("pattern", case.pattern, (*_DENSE, *_RAW)),
    )
    for what, name, known in named:
        if name not in known:
            return f"{what} {name or '(none)'} does not exist here; {', '.join(known)} do"
    most = _MOST_GPUS if case.is_eager else _MOST_SEARCHED
    if case.cp > most:
        return f"{case.cp} GPUs are more than the {most} that such plans are made for here"
    if case.strategy.startswith("grid"):
        return _refused_grid(case)
    return "" if case.is_eager else _refused_allocation(case)


def _refused_grid(case: Case) -> str:
    ranks = case.gpus_per_node if case.nodes == 1 else case.nodes
    if not case.rows or ranks % case.rows:
        return f"a grid of {case.rows} rows does not fit {ranks} GPUs or nodes"
    return "" if case.pattern == "full" else f"grids of pattern {case.pattern} do not exist here"


def _refused_allocation(case: Case) -> str:
    if case.pattern in _DENSE:
        return f"allocations of pattern {case.pattern} do not exist here"
    if _chunks(case) % case.cp:
        return f"{_chunks(case)} chunks of pattern {case.pattern} do not divide by {case.cp} GPUs"
    if case.strategy == "owner" and not case.levels and case.nodes not in _OWNER_NODES:
        return f"pattern strided on {case.nodes} nodes was not measured and is not planned here"
    return ""


def _dense(row: PublishedRow) -> Case | str:
    if row["gpus_per_node"] == "1":
        return "8 nodes of 1 GPU are an emulation"
    mode, fused = row["mode"] or "normal", row["kernel_tile"] == "1"
    if row["strategy"] == "ultra":
        if row["scheduler"] != "manual":
            return "the allocation of blocks to GPUs is unknown"
        label = "grid-fused" if fused else "grid"
        if mode != "normal" and (fused or row["heads"] != "32"):
            return "the switches nocomm and nocomp do not act on fused plans"
    else:
        label = row["strategy"]
    return Case(
        gpu=row["gpu"],
        nodes=int(row["nodes"]),
        gpus_per_node=int(row["gpus_per_node"]),
        pattern=row["pattern"],
        direction=row["direction"],
        strategy=label,
        heads=_heads(row),
        seqlen_q=int(row["Sq"]),
        seqlen_kv=int(row["Skv"]),
        rows=int(row["Y"] or 0),
        mode=mode,
        measured_s=float(row["time_s"]),
        author_s=None,
    )


def _heads(row: PublishedRow) -> int:
    """Heads of all sequences: a kernel and a transfer take them alike.

    Raises:
        ValueError: The heads have another width than all measured ones.
    """
    if int(row["head_dim"]) != _HEAD_DIM:
        raise ValueError(f"head_dim ({row['head_dim']}) must be {_HEAD_DIM}, as was measured")
    return int(row["heads"]) * int(row["bs"])


def _sparse(row: PublishedRow) -> Case | str:
    nodes, seqlen = int(row["nodes"]), int(row["S"])
    pattern, levels = row["pattern"], ""
    if row["strategy"] == "ring":
        label = "ring"
    elif row["allocation"] == "device_tile":
        fused = row["kernel_tile"] == "1"
        label, levels = "ultraattn", "node+device+schedule" + ("+kernel" if fused else "")
    elif row["allocation"] == "node_tile":
        label, levels = "owner", "" if nodes == 1 or pattern == "strided" else "node+schedule"
    else:
        return f"allocation {row['allocation'] or '(none)'} does not exist here"
    if pattern == "global_local" and nodes == 8 and seqlen < 256 * 1024:
        return "8 nodes, global+local, under 256K: variants differ up to 12.7 times by noise"
    return Case(
        gpu=row["gpu"],
        nodes=nodes,
        gpus_per_node=int(row["gpus_per_node"]),
        pattern=pattern,
        direction=row["direction"],
        strategy=label,
        heads=_heads(row),
        seqlen_q=seqlen,
        seqlen_kv=seqlen,
        rows=0,
        mode="normal",
        measured_s=float(row["time_s"]),
        author_s=float(row["author_predicted_s"]) if row["author_predicted_s"] else None,
        levels=levels,
    )


# Predictions ---------------------------------------------------------------------------------


def predict_run(case: Case, calibration: Calibration, effects: frozenset[Effect] = ALL) -> float:
    """Seconds that the row should take."""
    pricer = Pricer(
        calibration=calibration,
        convention=ULTRA,
        direction=case.pass_,
        scale_q=1.0,
        scale_kv=1.0,
        heads=case.heads,
        effects=effects,
    )
    if case.is_eager:
        return _eager(case, pricer)
    pricer.compute, pricer.transfers = case.mode != "nocomp", case.mode != "nocomm"
    if case.levels:
        text = f"ultraattn:levels={case.levels},seconds={_SEARCH_S}"
        shape = planned_run(text, case.pattern, case.cp, case.gpus_per_node, case.pass_)
        return _scaled(pricer, shape, case.seqlen_q, case.seqlen_kv)
    if case.strategy == "owner":
        return _owner(case, pricer)
    fused = case.strategy == "grid-fused"
    if case.nodes == 1:
        return _grid(case, pricer, case.seqlen_q, case.seqlen_kv, case.rows, fused=fused)
    return _nodes(case, pricer, fused=fused)


def _scaled(pricer: Pricer, shape: Skeleton, seqlen_q: int, seqlen_kv: int) -> float:
    pricer.scale_q, pricer.scale_kv = seqlen_q / shape.seqlen_q, seqlen_kv / shape.seqlen_kv
    return pricer.seconds_of(shape)


def _eager(case: Case, pricer: Pricer) -> float:
    pricer.convention = baseline_convention(case)
    return _scaled(pricer, baseline(case), case.seqlen_q, case.seqlen_kv)


def baseline(case: Case) -> Skeleton:
    """The skeleton of a ring, zigzag or stripe as it was measured."""
    # The measured zigzag and stripe know causal masks only: their rows of a full pattern ran one.
    pattern = case.pattern if case.strategy == "ring" else "causal"
    # The measured rings send everything everywhere, needed or not.
    text = "ring-classic" if case.strategy == "ring" else f"{case.strategy}:prune=false"
    return planned_run(text, pattern, case.cp, case.gpus_per_node, case.pass_, eager=True)


def baseline_convention(case: Case) -> Convention:
    """How it was run: on flash-attn; zigzag sent k and v as one forward, and merged nothing."""
    whole = case.strategy == "zigzag" and case.pass_ is Direction.FORWARD
    return replace(TORCH, merges=not whole, apart=not whole, ends_last=True)


def _grid(
    case: Case, pricer: Pricer, seqlen_q: int, seqlen_kv: int, rows: int, *, fused: bool
) -> float:
    text = f"grid:rows={rows}" + (",fused=true" if fused else "")
    shape = planned_run(text, "full", case.gpus_per_node, case.gpus_per_node, case.pass_)
    return _scaled(pricer, shape, seqlen_q, seqlen_kv)


def _nodes(case: Case, pricer: Pricer, *, fused: bool) -> float:
    """A grid of nodes: each tile is the best plan inside a node, each GPU sends its own part."""
    text = f"grid:rows={case.rows}" + (",fused=true" if fused else "")
    shape = planned_run(text, "full", case.nodes, 1, case.pass_)
    known: dict[TimedCall, float] = {}
    scale_q, scale_kv = case.seqlen_q / shape.seqlen_q, case.seqlen_kv / shape.seqlen_kv

    def inside(call: TimedCall) -> float:
        if call not in known:
            lengths = round(call.rows * scale_q), round(call.columns * scale_kv)
            part = replace(pricer, tile_s=None, far_ranks=1)
            start = Effect.START in pricer.effects
            # Measured plans over nodes are fused at both levels or at none.
            plans = [(y, fused and case.heads == 1) for y in _divisors(case.gpus_per_node)]
            best = min(_grid(case, part, *lengths, y, fused=f) for y, f in plans)
            known[call] = best - (pricer.calibration.effects.start_s if start else 0.0)
        return known[call]

    whole = replace(pricer, tile_s=inside, far_ranks=case.gpus_per_node)
    return _scaled(whole, shape, case.seqlen_q, case.seqlen_kv)


def _chunks(case: Case) -> int:
    """Chunks that a sparse pattern is cut into: its own, or one per GPU if those are more."""
    return max(_RAW[case.pattern], case.cp)


def _owner(case: Case, pricer: Pricer) -> float:
    if case.nodes == _PAIRED_NODES:
        return _strided_pairs(case, pricer)
    chunks = _chunks(case)
    shape = _owned(case.pattern, case.cp, chunks, case.gpus_per_node, case.pass_)
    return _scaled(pricer, shape, case.seqlen_q, case.seqlen_kv)


def _strided_pairs(case: Case, pricer: Pricer) -> float:
    """8 nodes, strided: pairs of nodes with a full block each and two 3/4 triangles between.

    A node computes one triangle beside its own block. Forward it fetches the keys of its partner,
    backward it gets the partner's queries and returns dq: fewer bytes than keys and their
    gradients. Each GPU exchanges its own part with its peer.
    """
    gpus, tokens = case.gpus_per_node, case.seqlen_q // case.nodes
    own = _table(("11", "11"), gpus, case.pass_)
    corner = _table(("10", "11"), gpus, case.pass_)
    start = pricer.calibration.effects.start_s if Effect.START in pricer.effects else 0.0
    full_s = _scaled(replace(pricer), own, tokens, tokens) - start
    corner_s = _scaled(replace(pricer), corner, tokens, tokens) - start
    links, crowd = pricer.calibration.links, pricer.calibration.effects.far
    chunk = tokens // gpus * case.heads * pricer.head_dim * 2
    move = pricer.crowded(links.far, crowd, 2 * chunk)[-1]
    if case.pass_ is Direction.FORWARD:
        return max(full_s, move) + corner_s + start
    back = pricer.crowded(links.far, crowd, chunk)[-1]
    return max(full_s, move + corner_s, move) + (corner_s if full_s > move else 0.0) + back + start


# Skeletons -----------------------------------------------------------------------------------


@lru_cache(maxsize=512)
def planned_run(
    text: str,
    pattern: str,
    cp: int,
    gpus_per_node: int,
    direction: Direction,
    *,
    eager: bool = False,
) -> Skeleton:
    """The skeleton of a strategy's plan."""
    problem = _problem(pattern, cp * _PER_CHUNK, cp)
    program = proved(strategy(text), problem, direction, Context(gpus_per_node=gpus_per_node))
    if text.startswith("ultraattn"):
        plan = program.plan  # theirs posts as soon as it may: without edges of `post_late`
        program = verify(rebuilt(plan, plan.tasks))
    return skeleton(program, gpus_per_node, eager=eager)


@lru_cache(maxsize=512)
def _owned(
    pattern: str, cp: int, chunks: int, gpus_per_node: int, direction: Direction
) -> Skeleton:
    """The skeleton of a plan in which the owner of a block's row computes it."""
    problem = _problem(pattern, chunks * _PER_CHUNK, cp)
    return skeleton(verify(owner_plan(problem, direction, chunks)), gpus_per_node)


@lru_cache(maxsize=64)
def _table(rows: tuple[str, ...], cp: int, direction: Direction) -> Skeleton:
    """As `_owned`, for a table of blocks as in `("11", "01")`, one chunk per rank."""
    table = np.array([list(map(int, row)) for row in rows], dtype=np.int8)
    seqlen = cp * _PER_CHUNK
    pattern = Pattern(
        text=f"table of {'/'.join(rows)}",
        seqlen_q=seqlen,
        seqlen_kv=seqlen,
        bands=table_bands(table, seqlen, seqlen),
        predicate=TableMask(table, seqlen, seqlen),
    )
    problem = replace(_problem("full", seqlen, cp), pattern=pattern)
    return skeleton(verify(owner_plan(problem, direction, cp)), cp)


def owner_plan(problem: Problem, direction: Direction, chunks: int) -> Plan:
    """Plan one tile per block of a table of chunks, each at the owner of its row."""
    cp = problem.cp
    per = chunks // cp
    owned = tuple(tuple(range(r * per, (r + 1) * per)) for r in range(cp))
    sharding = Sharding(split(problem.seqlen_q, chunks), owned)
    return plan_allocation(problem, "owner", direction, row_owner(sharding, sharding))


def _problem(pattern: str, seqlen: int, cp: int) -> Problem:
    return Problem(
        pattern=make_pattern(pattern, seqlen),
        heads_q=1,
        heads_kv=1,
        head_dim=_HEAD_DIM,
        dtype=Dtype.BFLOAT16,
        cp=cp,
    )


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)
