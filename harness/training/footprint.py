"""Memory of a GPU while a model trains: model states, the block at hand, attention's ledger.

The peak is the largest of four phases of a block: forward (run again from its input), the MLP's
backward, attention's backward, and the loss after the last block. `A` is one hidden state of a
rank's tokens. Held throughout, with checkpointing and offload:

    states      16 bytes a parameter, sharded over the ranks
    unsharded   embedding and head with their gradients, two blocks' weights (in use, coming next)
    stream      4 A: the first block's input (never offloaded), the input of the block at hand and
                of the next, on their way from the host, and the gradient of the residual stream

Source: released scripts and code of arXiv:2602.21196, and arXiv:2506.13996 for the tiles.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.cluster.machine import Cluster
from harness.memory.counting import Use
from harness.planning.chosen import Chosen
from harness.training.attention_memory import Held, attention_held
from harness.training.models import Model
from harness.training.stack import (
    DEFAULT_STACK,
    HOST_BYTES,
    STEP_TOKENS,
    Column,
    Stack,
    as_planned,
    counting,
)
from strategies import strategy

_VALUE = 2  # bytes of bfloat16
_WIDE = 4  # and of float32
_MOST_STEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes on the fullest GPU at the peak of a training step.

    Attributes:
        phase: When the peak is.
        parts: What it is made of: `states`, `unsharded`, `stream`, `mlp`, `loss`, and what the
            ledger of attention counts (see `counting.Use`).
        host_bytes: Per node, what rests in host memory.
    """

    phase: str
    parts: Mapping[str, int]
    host_bytes: int

    @property
    def peak_bytes(self) -> int:
        """All parts."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The longest context that fits.

    Attributes:
        tokens: In steps; 0 if not even the first fits.
        step_tokens: How far apart the contexts are that were tried.
        by: The memory that the next step exceeds: `gpu` or `host`.
        at_limit: Footprint at `tokens`; None if that is 0.
        beyond: Footprint of the next step.
    """

    tokens: int
    step_tokens: int
    by: str
    at_limit: Footprint | None
    beyond: Footprint


def on_cluster(name: str, machine: Cluster) -> Chosen:
    """Return a strategy as it is run on a cluster, where it has a way for several nodes."""
    chosen = strategy(name)
    on_nodes = chosen.strategy.training.on_nodes
    plain = name == chosen.strategy.name  # whoever gives options has chosen
    if machine.nodes == 1 or on_nodes is None or not plain:
        return chosen
    return replace(chosen, options=on_nodes(machine.nodes))


def footprint(
    model: Model,
    chosen: Chosen,
    machine: Cluster,
    seqlen: int,
    *,
    column: Column = Column.RELEASED,
    stack: Stack = DEFAULT_STACK,
) -> Footprint:
    """Return the memory of a training step over all GPUs of a cluster.

    Args:
        model: The model to train.
        chosen: How attention is spread.
        machine: cp is its number of GPUs.
        seqlen: Tokens, over all ranks.
        column: The way to count attention's memory.
        stack: The training stack around it.

    Raises:
        UnsupportedError: The strategy cannot do it.
    """
    cp = machine.gpus
    state = -(-seqlen // cp) * model.hidden * _VALUE  # A
    planned = as_planned(column, chosen)
    held = attention_held(
        model, planned, cp, machine.gpus_per_node, seqlen, counting(column, planned)
    )
    always = {
        "states": stack.state_bytes * model.parameters // cp,
        "unsharded": _VALUE * (4 * model.table_parameters + 2 * model.block_parameters),
    }
    stream = _stream(model, stack, held, state)
    tokens = state // (model.hidden * _VALUE)
    phases = {
        "attention, backward": {"stream": stream, **_named(held.backward)},
        "attention, forward": {"stream": stream, **_named(held.forward)},
        "MLP, backward": {
            "stream": stream,
            "saved": held.saved,
            "mlp": _mlp(model, stack, state, tokens),
        },
        # No block is at hand; instead there is what the last one put out.
        "loss": {
            "stream": stream - 2 * state if stack.offload and stack.checkpoint else stream,
            "loss": _loss(model, stack, state, tokens),
        },
    }
    phase, parts = max(phases.items(), key=lambda item: sum(item[1].values()))
    resting = (model.layers - 1) * state if stack.offload and stack.checkpoint else 0
    return Footprint(
        phase=phase,
        parts={**always, **parts},
        host_bytes=machine.gpus_per_node * (resting + held.host),
    )


def max_context(
    model: Model,
    chosen: Chosen,
    machine: Cluster,
    *,
    column: Column = Column.RELEASED,
    stack: Stack = DEFAULT_STACK,
    gpu_bytes: int | None = None,
    host_bytes: int = HOST_BYTES,
    step_tokens: int | None = None,
) -> Limit:
    """Return the longest context whose training step fits, in steps.

    Args:
        model: The model to train.
        chosen: How attention is spread.
        machine: Its GPUs.
        column: The way to count attention's memory.
        stack: The training stack around it.
        gpu_bytes: Memory of a GPU; None is the machine's.
        host_bytes: Memory of a node's host.
        step_tokens: Distance of the contexts that are tried; None is 2**20 a node.

    Raises:
        UnsupportedError: The strategy cannot do it.
    """
    room = machine.gpu.memory_bytes if gpu_bytes is None else gpu_bytes
    step = STEP_TOKENS * machine.nodes if step_tokens is None else step_tokens
    last: Footprint | None = None
    for count in range(1, _MOST_STEPS + 1):
        found = footprint(model, chosen, machine, count * step, column=column, stack=stack)
        by = "gpu" if found.peak_bytes > room else "host" if found.host_bytes > host_bytes else ""
        if by or count == _MOST_STEPS:
            return Limit(
                tokens=(count - 1) * step,
                step_tokens=step,
                by=by or "nothing",
                at_limit=last,
                beyond=found,
            )
        last = found
    raise AssertionError("unreachable: the loop returns at its last step")


def _named(uses: Mapping[Use, int]) -> dict[str, int]:
    return {use.value: size for use, size in uses.items() if size}


def _stream(model: Model, stack: Stack, held: Held, state: int) -> int:
    """Block inputs on the device and the stream's gradient."""
    if not stack.checkpoint:
        # Every block keeps what its parts saved: attention, both norms, three factors of the MLP.
        mlp = 3 * state * model.ffn // model.hidden
        return model.layers * (held.saved + 3 * state + mlp) + state
    return (4 if stack.offload else model.layers + 1) * state


def _mlp(model: Model, stack: Stack, state: int, tokens: int) -> int:
    """The stream between attention and MLP, the norm of it and its gradient; and a tile's insides.

    A tile has about as many tokens as the model is wide (arXiv:2506.13996, TiledMLP). Inside are
    gate, up, the activation and the product, and their gradients.
    """
    tile = min(tokens, model.hidden) if stack.tiled else tokens
    return 3 * state + 8 * tile * model.ffn * _VALUE


def _loss(model: Model, stack: Stack, state: int, tokens: int) -> int:
    """The last norm, its gradient, and logits.

    Tiled, a tile's logits take as much as a hidden state and become their gradient in place
    (Liger-Kernel, fused_linear_cross_entropy.py); else they have a float32 copy and its gradient.
    """
    if stack.tiled:
        return 3 * state
    return 2 * state + tokens * model.vocab * (_VALUE + 2 * _WIDE)
