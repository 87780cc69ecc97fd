"""What is counted in proved plans: bytes, work, tiles, transfers. A setting gives the problem."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from harness.explain.overlap_rule import LINKS, hiding_block_tokens
from harness.explain.volumes import received_bytes
from harness.plan.imbalance import imbalance_lockstep, imbalance_total, work_by_rank
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.sizes import leg_bytes
from harness.plan.tasks import Collective, CollectiveKind, Tensor, Tile, legs_of
from harness.planning.strategy import Context
from harness.proved.plans import proved
from patterns import make_pattern
from strategies import strategy

ClaimSetting = Mapping[str, Any]
BYTES = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "GB": 10**9}
_HEAD_DIM = 128


def problem_in(setting: ClaimSetting) -> Problem:
    """Read a problem: `seqlen`, `heads` as 32/8, `cp`; else causal, 128 wide, bfloat16, batch 1."""
    queries, keys = setting["seqlen"], setting.get("seqlen_kv", setting["seqlen"])
    query, kv = (int(n) for n in (*str(setting["heads"]).split("/"), setting["heads"])[:2])
    return Problem(
        pattern=make_pattern(
            setting.get("pattern", "causal"), queries, keys, cross=queries != keys
        ),
        heads_q=query,
        heads_kv=kv,
        head_dim=setting.get("head_dim", _HEAD_DIM),
        dtype=Dtype(setting.get("dtype", "bfloat16")),
        cp=setting["cp"],
        batch=setting.get("batch", 1),
        round_sent=setting.get("round_sent", False),
    )


def plan_in(setting: ClaimSetting, name: str = "") -> Plan:
    """Plan and prove a setting's problem by its `strategy`, or by the one named."""
    direction = Direction(setting.get("direction", Direction.FORWARD))
    context = Context(gpus_per_node=setting.get("gpus_per_node", 8))
    return _plan(name or setting["strategy"], problem_in(setting), direction, context)


@lru_cache(maxsize=64)
def _plan(name: str, problem: Problem, direction: Direction, context: Context) -> Plan:
    return proved(strategy(name), problem, direction, context).plan


def volume_received(setting: ClaimSetting) -> float:
    """Bytes that the busiest rank receives, or those of `rank`, in `size`."""
    sizes = received_bytes(plan_in(setting))
    return (sizes[setting["rank"]] if "rank" in setting else max(sizes)) / BYTES[setting["size"]]


def received_units(setting: ClaimSetting) -> float:
    """Elements that the busiest rank receives, in units of hidden states of a rank."""
    plan = plan_in(setting)
    problem = plan.problem
    unit = problem.seqlen_q / problem.cp * problem.heads_q * problem.head_dim * problem.dtype.bytes
    return max(received_bytes(plan)) / unit


def received_over(setting: ClaimSetting) -> float:
    """Bytes received by all ranks with `strategy`, over those with `other`."""
    one, other = (sum(received_bytes(plan_in(setting, setting[k]))) for k in ("strategy", "other"))
    return one / other


def received_both_over(setting: ClaimSetting) -> float:
    """As `received_over`, forward and backward together."""
    ways = [{**setting, "direction": direction.value} for direction in Direction]
    sums = [
        sum(sum(received_bytes(plan_in(way, setting[k]))) for way in ways)
        for k in ("strategy", "other")
    ]
    return sums[0] / sums[1]


def less_received(setting: ClaimSetting) -> float:
    """Share of bytes that `strategy` saves over `other`."""
    return 1 - received_over(setting)


def less_received_both(setting: ClaimSetting) -> float:
    """Share of bytes that `strategy` saves over `other`, forward and backward together."""
    return 1 - received_both_over(setting)


def imbalance_in(setting: ClaimSetting) -> float:
    """Work of the busiest rank over the mean."""
    return imbalance_total(plan_in(setting))


def lockstep_in(setting: ClaimSetting) -> float:
    """The same, when ranks wait for the slowest at every step."""
    return imbalance_lockstep(plan_in(setting))


def work_in(setting: ClaimSetting) -> float:
    """Work of one `rank` in full blocks of `seqlen` / `blocks_a_side`, one head."""
    side = float(setting["seqlen"] / setting["blocks_a_side"])
    return work_by_rank(plan_in(setting))[setting["rank"]] / side**2


def mean_work(setting: ClaimSetting) -> float:
    """Mean work of a rank, as `work_in`."""
    work = work_by_rank(plan_in(setting))
    side = float(setting["seqlen"] / setting["blocks_a_side"])
    return sum(work) / len(work) / side**2


def tiles_in(setting: ClaimSetting) -> float:
    """Tiles of a plan, or those of one `rank`."""
    tiles = [task.place.rank for task in plan_in(setting).tasks if isinstance(task, Tile)]
    return tiles.count(setting["rank"]) if "rank" in setting else len(tiles)


def tokens_in(setting: ClaimSetting) -> float:
    """Query tokens of the rank that owns most."""
    plan = plan_in(setting)
    owned = [0] * plan.problem.cp
    for place, piece in plan.initial:
        if piece.tensor is Tensor.Q and piece.heads & 1:
            owned[place.rank] += sum(len(plan.q_chunks[chunk]) for chunk in piece.chunks)
    return max(owned)


def heads_in(setting: ClaimSetting) -> float:
    """Query heads that a rank attends."""
    plan = plan_in(setting)
    heads = [0] * plan.problem.cp
    for task in plan.tasks:
        if isinstance(task, Tile):
            heads[task.place.rank] |= task.heads
    return max(each.bit_count() for each in heads)


def key_transfers(setting: ClaimSetting) -> float:
    """Chunks of keys that ranks receive from others."""
    return len(_keys_received(plan_in(setting)))


def idle_transfers(setting: ClaimSetting) -> float:
    """Those of them that meet no tile where they arrive."""
    plan = plan_in(setting)
    met = {
        (task.place.rank, key) for task in plan.tasks if isinstance(task, Tile) for key in task.kv
    }
    return sum(key not in met for key in _keys_received(plan))


def _keys_received(plan: Plan) -> list[tuple[int, int]]:
    return [
        (leg.dst.rank, chunk)
        for task in plan.tasks
        for leg in legs_of(task)
        if leg.src.rank != leg.dst.rank
        for piece in leg.pieces
        if piece.tensor is Tensor.K
        for chunk in piece.chunks
    ]


def all_to_alls_in(setting: ClaimSetting) -> float:
    """All-to-alls of a plan."""
    return sum(
        isinstance(task, Collective) and task.kind is CollectiveKind.ALL_TO_ALL
        for task in plan_in(setting).tasks
    )


def links_used(setting: ClaimSetting) -> float:
    """Share of the directed links between ranks that a plan sends over."""
    plan = plan_in(setting)
    ends = {(leg.src.rank, leg.dst.rank) for task in plan.tasks for leg in legs_of(task)}
    used = sum(src != dst for src, dst in ends)
    return used / (plan.problem.cp * (plan.problem.cp - 1))


def idle_nics(setting: ClaimSetting) -> float:
    """Share of directions of NICs, one per GPU, that a plan never uses."""
    plan, width = plan_in(setting), setting["gpus_per_node"]
    used = set()
    for task in plan.tasks:
        for leg in legs_of(task):
            if leg.src.rank // width != leg.dst.rank // width:
                used |= {(leg.src.rank, "out"), (leg.dst.rank, "in")}
    return 1 - len(used) / (2 * plan.problem.cp)


def busiest_link_over(setting: ClaimSetting) -> float:
    """Bytes over the busiest directed link with `strategy`, over those with `other`."""
    one, other = (_busiest_link(plan_in(setting, setting[k])) for k in ("strategy", "other"))
    return one / other


def _busiest_link(plan: Plan) -> int:
    sent: dict[tuple[int, int], int] = {}
    for task in plan.tasks:
        for leg in legs_of(task):
            if leg.src.rank != leg.dst.rank:
                ends = leg.src.rank, leg.dst.rank
                sent[ends] = sent.get(ends, 0) + leg_bytes(plan, leg)
    return max(sent.values())


def block_length(setting: ClaimSetting) -> float:
    """Shortest block, in thousands, that hides a ring's transfer over `link`."""
    (link,) = (each for each in LINKS if each.name == setting["link"])
    return hiding_block_tokens(problem_in(setting), link) / 1000


def new_tokens_with_equal_bytes(setting: ClaimSetting) -> float:
    """Share of new tokens at which a message of queries is as large as one of keys and values.

    Both are lines of a plan's blocks: q of the new tokens against k and v of all.
    """
    problem = problem_in(setting)
    per_query = problem.heads_q * problem.head_dim
    per_key = problem.heads_kv * (problem.head_dim + problem.head_dim_v)
    return per_key / per_query
