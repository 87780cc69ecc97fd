"""Predictions of measured runs of published harnesses, each as it was run.

    ultra, manual, one node        grid:rows=Y, as a queue launched ahead; fused by collectives
    ultra, manual, several nodes   grid:rows=Y of nodes, each tile the best grid inside a node
    ultra, node_tile               every block at the owner of its row; where a pattern joins nodes,
                                   in the node that the level `node` of ultraattn gives it
    ultra, device_tile             the plan of ultraattn here against theirs, whose ties are unknown
    ring, zigzag, stripe           the strategy of that name in eager torch
    methods of charts, double ring the strategy that `measured_runs` names, as the product runs it

What follows a rule is planned once for each structure and scaled, as the product does it
(`prepare.scalable_plan`); what searches is planned at the row's own size and heads, on its cluster.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from harness.base.cache import cache_folder
from harness.cluster.calibration import Calibration
from harness.cluster.effects import ALL, Effect
from harness.cluster.machine import Runtime
from harness.cluster.presets import cluster
from harness.cluster.validated import PlanClass
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.sharding import Sharding, split
from harness.planning.block_assignment import row_owner
from harness.planning.block_transfers import plan_allocation
from harness.planning.strategy import Context
from harness.prepare.scalable_plan import Structure
from harness.prepare.scalable_plan_cache import structure_of
from harness.proved.plans import proved
from harness.records.config import Config, Where
from harness.reproduce.case import HEAD_DIM, Case
from harness.reproduce.ultraattn_rows import PAIRED_NODES, chunks_of
from harness.simulate.calibrated import NEXT_TO_NONE, pricer, regime_of
from harness.simulate.job_costs import TORCH, ULTRA, Convention, Pricer
from harness.simulate.job_graph import skeleton
from harness.simulate.jobs import Skeleton
from harness.simulate.tile_calls import TimedCall
from harness.verify.proof import verify
from patterns import make_pattern
from patterns.pattern import Pattern
from patterns.table import TableMask, table_bands
from strategies import strategy

_SEARCH_S = 0.2  # CPU seconds per tiling and per schedule of ultraattn
_PER_CHUNK = 1024  # tokens of the reference problem


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
        nodes=case.nodes,
    )
    if case.text:
        return _as_typed(case, calibration, effects)
    if case.is_eager:
        return _eager(case, pricer)
    pricer.compute, pricer.transfers = case.mode != "nocomp", case.mode != "nocomm"
    if case.levels:
        pricer.heads = 1  # the plan has them
        return pricer.seconds_of(_at_own_size(case, calibration).shape)
    if case.strategy == "owner":
        return _owner(case, pricer)
    fused = case.strategy == "grid-fused"
    if case.nodes == 1:
        return _grid(case, pricer, case.seqlen_q, case.seqlen_kv, case.rows, fused=fused)
    return _nodes(case, pricer, fused=fused)


def kinds_of(case: Case) -> tuple[str, ...]:
    """Kinds of the transfers that a run makes; see `cluster.transfer_kinds`."""
    if case.text:
        return _kinds(_structure(_typed(case), fitted_of(case)).shape)
    if case.is_eager:
        return _kinds(baseline(case))
    if case.strategy == "owner" and case.nodes != PAIRED_NODES:
        return _kinds(
            _owned(case.pattern, case.cp, chunks_of(case), case.gpus_per_node, case.pass_)
        )
    if case.strategy == "owner":  # a GPU exchanges with its peer in the other node of its pair
        return ("far one_peer", "near several_peers")
    fused = ",fused=true" if case.strategy == "grid-fused" else ""
    text = f"grid:rows={case.rows}{fused}"
    if case.nodes == 1:
        return _kinds(planned_run(text, "full", case.cp, case.gpus_per_node, case.pass_))
    far = _kinds(planned_run(text, "full", case.nodes, 1, case.pass_))
    inner = "grid:fused=true" if fused and case.heads == 1 else "grid"
    gpus = case.gpus_per_node
    return tuple(sorted({*far, *_kinds(planned_run(inner, "full", gpus, gpus, case.pass_))}))


def _kinds(shape: Skeleton) -> tuple[str, ...]:
    return tuple(kind for kind in shape.kinds.split(",") if kind)


def fitted_of(case: Case) -> Calibration:
    """The calibration that predicts a run."""
    found = cluster(case.cluster).fitted
    assert found is not None  # every cluster that predicts runs is
    return found


def class_of_run(case: Case, predicted_s: float, fixed_s: float) -> PlanClass:
    """The class of a run, as of a plan here.

    Args:
        case: The run.
        predicted_s: Its predicted time.
        fixed_s: What is predicted for next to no tokens: see `next_to_none`.
    """
    kinds = kinds_of(case)
    graph = Runtime.EAGER if case.is_eager else Runtime.GRAPH
    return PlanClass(
        runtime=case.runtime if case.text else graph.value,
        direction=case.pass_.value,
        nodes=case.nodes if any(kind.startswith("far") for kind in kinds) else 1,
        transfers=kinds,
        regime=regime_of(min(1.0, fixed_s / predicted_s)),
    )


def next_to_none(case: Case) -> Case:
    """The same run with next to no tokens, as `calibrated.latency_share` has it."""
    most = max(case.seqlen_q, case.seqlen_kv)
    tokens = min(most, case.cp * NEXT_TO_NONE)
    least = case.cp
    seqlens = (max(least, n * tokens // most) for n in (case.seqlen_q, case.seqlen_kv))
    seqlen_q, seqlen_kv = seqlens
    return replace(case, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)


def _scaled(pricer: Pricer, shape: Skeleton, seqlen_q: int, seqlen_kv: int) -> float:
    pricer.scale_q, pricer.scale_kv = seqlen_q / shape.seqlen_q, seqlen_kv / shape.seqlen_kv
    return pricer.seconds_of(shape)


def _eager(case: Case, pricer: Pricer) -> float:
    pricer.convention = baseline_convention(case)
    return _scaled(pricer, baseline(case), case.seqlen_q, case.seqlen_kv)


def baseline(case: Case) -> Skeleton:
    """The skeleton of a ring, zigzag or stripe as it was measured."""
    # The measured rings send everything everywhere, needed or not.
    text = "ring-classic" if case.strategy == "ring" else f"{case.strategy}:prune=false"
    return planned_run(text, case.ran, case.cp, case.gpus_per_node, case.pass_, eager=True)


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
            part = replace(pricer, tile_s=None, far_ranks=1, nodes=1)
            start = Effect.START in pricer.effects
            # Measured plans over nodes are fused at both levels or at none.
            plans = [(y, fused and case.heads == 1) for y in _divisors(case.gpus_per_node)]
            best = min(_grid(case, part, *lengths, y, fused=f) for y, f in plans)
            known[call] = best - (pricer.calibration.effects.start_s if start else 0.0)
        return known[call]

    whole = replace(pricer, tile_s=inside, far_ranks=case.gpus_per_node)
    return _scaled(whole, shape, case.seqlen_q, case.seqlen_kv)


def _owner(case: Case, pricer: Pricer) -> float:
    if case.nodes == PAIRED_NODES:
        return _strided_pairs(case, pricer)
    chunks = chunks_of(case)
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


def _config(case: Case, strategy_text: str, cluster_name: str, runtime: Runtime) -> Config:
    """The cell that a row is."""
    return Config(
        strategy=strategy_text,
        pattern=case.pattern,
        cp=case.cp,
        seqlen_q=case.seqlen_q,
        seqlen_kv=case.seqlen_kv,
        heads_q=case.heads,
        heads_kv=case.heads_kv or case.heads,
        head_dim=HEAD_DIM,
        dtype=Dtype.BFLOAT16,
        direction=case.pass_,
        transport=Where.SIMULATED,
        cluster=cluster_name,
        runtime=runtime,
    )


def _at_own_size(case: Case, calibration: Calibration) -> Structure:
    """Plan what searches as the product does: for these lengths, heads and speeds."""
    text = f"ultraattn:levels={case.levels},seconds={_SEARCH_S}"
    config = _config(case, text, case.cluster, Runtime.GRAPH)
    sheet = replace(calibration.hardware, gpus_per_node=case.gpus_per_node)
    return structure_of(config, replace(calibration, hardware=sheet), cache_folder() / "structures")


def _as_typed(case: Case, calibration: Calibration, effects: frozenset[Effect]) -> float:
    """Time what runs as the product runs it in eager torch, from one plan of all lengths."""
    config = _typed(case)
    made = _structure(config, calibration)
    prices = pricer(
        config.problem,
        case.pass_,
        calibration,
        eager=True,
        effects=effects,
        scale=case.seqlen_q / made.tokens,
        own_stream=Runtime(case.runtime).own_stream,
    )
    return prices.seconds_of(made.shape)


def _typed(case: Case) -> Config:
    """The cell that is planned for a typed strategy: at one length per rank."""
    tokens = case.cp * 2 * _PER_CHUNK
    same = replace(case, seqlen_q=tokens, seqlen_kv=tokens)
    return _config(same, case.text, case.cluster, Runtime(case.runtime))


@lru_cache(maxsize=128)
def _structure(config: Config, calibration: Calibration) -> Structure:
    return structure_of(config, calibration, cache_folder() / "structures")


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
        head_dim=HEAD_DIM,
        dtype=Dtype.BFLOAT16,
        cp=cp,
    )


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)
