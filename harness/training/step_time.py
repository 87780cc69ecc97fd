"""How long a training step takes: attention by the simulator, the rest of a block by its counts.

    T(S) = launch + linear + quadratic

Attention's quadratic part is its kernels' flops; the linear part is products, merges, whatever
moves over links and is not hidden, the MLP, the norms, the loss and the offload of block inputs;
what remains is starts of kernels and transfers, and the optimizer. Seconds of attention are those
of the quick clock (`simulate.task_costs`), in the order and overlap that the simulator finds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from math import prod

from harness.cluster.machine import Cluster, LinkClass, Runtime
from harness.plan.problem import Direction, Dtype
from harness.plan.residency import Program
from harness.plan.sizes import tile_flops
from harness.plan.tasks import Collective, Free, Linear, Place, Tile, Transfer, legs_of, ranks_of
from harness.planning.chosen import Chosen
from harness.simulate.queues import Stream, number_of, stream_of
from harness.simulate.simulator import simulate
from harness.simulate.streams import Work, work_of
from harness.simulate.task_costs import costs_on
from harness.training.attention_memory import (
    attention_held,
    fixed_parts,
    layer_program,
    with_parts,
)
from harness.training.models import Model
from harness.training.stack import (
    DEFAULT_STACK,
    HOST_REST_BYTES_PER_S,
    Column,
    Stack,
    as_planned,
    as_run,
    counting,
    released,
)

_VALUE = 2  # bytes of bfloat16
_KNOTS = (4, 5, 6)  # parts of the plans from which times of more parts are extended
_LIGHT_PASSES = 340
"""How often norms, residual sums, rotations and SwiGLU of a block move a hidden state in a step.

Counted in eager code: a float32 RMSNorm 18, a residual sum 3, SwiGLU 17.5, rotations 12 forward;
twice that backward; run again by checkpoint and tiles.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """Seconds of one direction of one attention layer.

    Attributes:
        launch_s: Starts of kernels and transfers on the busiest rank.
        attention_s: Flops of its attention.
        products_s: Flops of its projections.
        light_s: Its merges, casts and sums.
        exposed_s: Waiting time: for exposed transfers and for other ranks.
    """

    launch_s: float
    attention_s: float
    products_s: float
    light_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a training step.

    Attributes:
        terms: By name; see `launch_s`, `linear_s` and `quadratic_s` for how they grow.
    """

    terms: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self.terms.values())

    @property
    def launch_s(self) -> float:
        """Seconds that do not grow with the context."""
        return self.terms["launch"] + self.terms["optimizer"]

    @property
    def quadratic_s(self) -> float:
        """Seconds that grow with the square of the context."""
        return self.terms["attention"]

    @property
    def linear_s(self) -> float:
        """The rest."""
        return self.seconds - self.launch_s - self.quadratic_s


def step_time(
    model: Model,
    chosen: Chosen,
    machine: Cluster,
    seqlen: int,
    *,
    column: Column = Column.RELEASED,
    stack: Stack = DEFAULT_STACK,
) -> StepTime:
    """Return the seconds of a step over all GPUs of a cluster, at the rates of `as_run`.

    Args:
        model: The model to train.
        chosen: How attention is spread.
        machine: cp is its number of GPUs.
        seqlen: Tokens, over all ranks.
        column: Whether released rings send everything.
        stack: The training stack around attention.

    Raises:
        UnsupportedError: The strategy cannot do it.
    """
    machine = as_run(machine)
    planned = as_planned(column, chosen)
    forward, backward = (
        layer_time(model, planned, machine, seqlen, direction) for direction in Direction
    )
    passes = 2 if stack.checkpoint else 1
    tokens = seqlen / machine.gpus
    state = tokens * model.hidden * _VALUE
    gpu = machine.gpu
    speed = gpu.peak_flops_per_s(Dtype.BFLOAT16) * gpu.efficiency_linear
    terms = {
        field.name.removesuffix("_s"): model.layers
        * (passes * getattr(forward, field.name) + getattr(backward, field.name))
        for field in fields(LayerTime)
    }
    # Forward, as often again as checkpoint and tiles ask for, and two products backward.
    runs = passes + stack.tiled + 2
    terms["mlp"] = model.layers * runs * 2 * tokens * model.mlp_parameters_used / speed
    # The fused loss makes gradients at once: one product forward, two backward.
    terms["loss"] = 3 * 2 * tokens * model.table_parameters / speed
    terms["light"] += model.layers * _LIGHT_PASSES * state / gpu.memory_bandwidth_bytes_per_s
    terms["offload"] = 0.0
    if stack.checkpoint and stack.offload:
        moved = 2 * (model.layers - 1) * state
        terms["offload"] = moved / machine.host_link.bandwidth_bytes_per_s
    again = _again_bytes(model, planned, machine, seqlen, passes, column)
    terms["exposed"] += model.layers * again / machine.nic.bandwidth_bytes_per_s
    terms["resting"] = model.layers * _resting_s(model, planned, machine, seqlen, passes)
    states = 2 * stack.state_bytes * model.parameters / machine.gpus  # read and written
    terms["optimizer"] = states / gpu.memory_bandwidth_bytes_per_s
    return StepTime(terms=terms)


def _again_bytes(
    model: Model, chosen: Chosen, machine: Cluster, seqlen: int, passes: int, column: Column
) -> float:
    """Bytes that released code sends between nodes, per rank and layer, beyond need."""
    known = released(chosen) if column is Column.RELEASED else None
    if known is None or known.extra_bytes is None:
        return 0.0
    problem = model.layer(machine.gpus, seqlen)
    forward, backward = (known.extra_bytes(problem, direction) for direction in Direction)
    return passes * forward + backward


def _resting_s(model: Model, chosen: Chosen, machine: Cluster, seqlen: int, passes: int) -> float:
    """Time in which what comes to rest on the host gets there, which nothing hides.

    Released code takes fresh pinned memory for each tensor of each part and waits for it, which is
    far slower than the link (DeepSpeed, fpdt_layer.py).
    """
    held = attention_held(
        model,
        chosen,
        machine.gpus,
        machine.gpus_per_node,
        seqlen,
        counting(Column.RELEASED, chosen),
    )
    moved = passes * held.host_forward + max(0, held.host - held.host_forward)
    return moved / HOST_REST_BYTES_PER_S


def layer_time(
    model: Model, chosen: Chosen, machine: Cluster, seqlen: int, direction: Direction
) -> LayerTime:
    """Simulate one direction of one attention layer.

    A plan with parts of a fixed length has many tasks: in their number each term is a polynomial
    of second degree, and is extended from plans of few parts.
    """
    parts = fixed_parts(model, chosen, machine.gpus, machine.gpus_per_node, seqlen)
    if parts is None:
        return _layer_time(model, chosen.text, machine, seqlen, direction)
    part = -(-seqlen // parts)

    def at(count: int) -> LayerTime:
        text = with_parts(chosen, count).text
        return _layer_time(model, text, machine, count * part, direction)

    if parts <= max(_KNOTS):
        return at(parts)
    known = [at(count) for count in _KNOTS]
    return LayerTime(
        **{
            field.name: _extended([getattr(time, field.name) for time in known], parts)
            for field in fields(LayerTime)
        }
    )


def _extended(values: Sequence[float], at: int) -> float:
    """The polynomial through values at `_KNOTS`."""
    return sum(
        value * prod((at - other) / (knot - other) for other in _KNOTS if other != knot)
        for knot, value in zip(_KNOTS, values, strict=True)
    )


@lru_cache(maxsize=512)
def _layer_time(
    model: Model, text: str, machine: Cluster, seqlen: int, direction: Direction
) -> LayerTime:
    program = layer_program(model, text, machine.gpus, machine.gpus_per_node, seqlen, direction)
    costs = costs_on(program, machine)
    work = _blocked(work_of(program, machine, Runtime.GRAPH), program)
    whole = simulate(program, machine, work=work).makespan_s
    sums = [[0.0] * 4 for _ in range(machine.gpus)]  # launch, attention, products, light
    gpu = machine.gpu
    for index, task in enumerate(program.plan.tasks):
        match task:
            case Transfer() | Collective():
                latency = max(
                    (_latency(machine, leg.src, leg.dst) for leg in legs_of(task)),
                    default=0.0,
                )
                for rank in ranks_of(task):
                    sums[rank][0] += latency if isinstance(task, Collective) else 0.0
            case Free():
                pass
            case _:
                rank, time = task.place.rank, costs.compute_s(index)
                start = gpu.kernel_start_s * costs.launches(index)
                kind, flops = 3, 0.0
                if isinstance(task, Tile):
                    kind, flops = 1, costs.attention_s(tile_flops(program.plan, task))
                    sums[rank][3] += time - start - flops
                elif isinstance(task, Linear):
                    kind, flops = 2, time - start
                else:
                    flops = time - start
                sums[rank][0] += start
                sums[rank][kind] += flops
    launch, attention, products, light = max(sums, key=sum)
    return LayerTime(
        launch_s=launch,
        attention_s=attention,
        products_s=products,
        light_s=light,
        exposed_s=max(0.0, whole - launch - attention - products - light),
    )


def _blocked(work: Work, program: Program) -> Work:
    """Let a transfer between nodes hold the compute stream of the rank that it goes to.

    In eager torch it waits for the kernels that were launched before it, and the next one waits for
    it: rings over nodes take the sum of kernels and transfers (docs/predictor.md).
    """
    transfers = {i for i, task in enumerate(program.plan.tasks) if isinstance(task, Transfer)}
    for index, activity in enumerate(work.activities):
        to = [rank for rank, stream in map(stream_of, activity.streams) if stream is Stream.NIC_IN]
        if to and activity.task in transfers:
            compute = number_of(to[0], Stream.COMPUTE)
            work.activities[index] = activity._replace(streams=(*activity.streams, compute))
    return work


def _latency(machine: Cluster, src: Place, dst: Place) -> float:
    """The latency of a link between ranks; what stays at a rank has none."""
    match kind := machine.link_class(src, dst):
        case LinkClass.NVLINK | LinkClass.NIC:
            return machine.link(kind).latency_s
        case LinkClass.LOCAL | LinkClass.HOST:
            return 0.0
