"""What frameworks call a strategy, and what they refuse: their own settings, each with its source.

A strategy says in its `settings` by which of these it is what a framework does. Nothing here was
run: it is what their code and documentation say, at the versions named.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from harness.errors import UnsupportedError
from harness.plan.problem import Problem
from harness.plan.sharding import Placement
from harness.planning.peers import PREFIX, peer, refuse

_FULL, _CAUSAL, _WINDOW, _PACKED = "full", "causal", "window", "documents"


class Framework(StrEnum):
    """A framework that trains with context parallelism."""

    MEGATRON = "megatron"
    TORCHTITAN = "torchtitan"
    DEEPSPEED = "deepspeed"
    RING_FLASH_ATTENTION = "ring-flash-attention"
    YUNCHANG = "yunchang"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkSetting:
    """How a framework is told to run a strategy.

    Attributes:
        framework: Which.
        text: Its own names of it.
        refusal: Why it refuses the problem; empty where it takes it.
        source: Where that is written.
    """

    framework: Framework
    text: str
    refusal: str = ""
    source: str


_Rule = tuple[bool, str]


def _first(rules: Iterable[_Rule]) -> str:
    """The first rule that is broken, in words."""
    return next((text for wrong, text in rules if wrong), "")


def _kind(problem: Problem) -> str:
    return problem.pattern.text.partition(":")[0]


def _divides(problem: Problem, unit: int, what: str) -> _Rule:
    wrong = problem.seqlen_q % unit != 0
    return wrong, f"seqlen ({problem.seqlen_q}) must be a multiple of {what} ({unit})"


def _heads_divide(problem: Problem, degree: int) -> _Rule:
    q, kv = problem.heads_q, problem.heads_kv
    return bool(q % degree or kv % degree), f"heads ({q}/{kv}) must be multiples of {degree}"


def _mask(problem: Problem, *taken: str) -> _Rule:
    return _kind(problem) not in taken, f"pattern ({problem.pattern.text}) must be " + " or ".join(
        taken
    )


# Megatron-LM, with TransformerEngine ---------------------------------------------------------

_TE = "TransformerEngine d0067d0, context_parallel.py"


def megatron(
    problem: Problem, comm: str, placement: Placement | None, degrees: tuple[int, int]
) -> FrameworkSetting:
    """Return Megatron's setting of a strategy.

    Args:
        problem: The problem.
        comm: `--cp-comm-type`.
        placement: How tokens are dealt; None where heads are dealt and tokens stay in order.
        degrees: Ranks that trade heads, and ranks of the ring.
    """
    heads, ring = degrees
    packed = _kind(problem) == _PACKED
    # Source: TransformerEngine d0067d0, context_parallel.py: DualChunkSwap always; thd per document
    dealt = Placement.DOCUMENTS if packed else Placement.ZIGZAG
    windows = comm in ("a2a", "all_gather")  # Source: as above, lines 5021-5070
    taken = (_FULL, _CAUSAL, _PACKED, *((_WINDOW,) if windows else ()))
    windowed = packed and _WINDOW in problem.pattern.text
    rules = (
        _mask(problem, *taken),
        (windowed and not windows, f"pattern ({problem.pattern.text}) must have no window"),
        (placement not in (None, dealt), f"tokens are dealt as placement={dealt} only"),
        _divides(problem, 2 * problem.cp, "2 x cp"),
        _heads_divide(problem, heads),
    )
    sizes = f" --hierarchical-context-parallel-sizes {heads} {ring}" if min(degrees) > 1 else ""
    return FrameworkSetting(
        framework=Framework.MEGATRON,
        text=f"--context-parallel-size {problem.cp} --cp-comm-type {comm}{sizes}",
        refusal=_first(rules),
        source=_TE + "; Megatron-LM d98e8a6, arguments.py",
    )


# PyTorch's context_parallel, as torchtitan sets it -------------------------------------------


def torchtitan(problem: Problem, rotate: str, placement: Placement) -> FrameworkSetting:
    """Return torchtitan's setting of a strategy.

    Args:
        problem: The problem.
        rotate: How keys travel: `allgather`, or `alltoall` step by step.
        placement: How tokens are dealt.
    """
    balanced = placement is Placement.ZIGZAG
    rules = (
        # Source: torch, "Load balancing requires is_causal=True"; without it the mask must be full
        _mask(problem, _CAUSAL if balanced else _FULL),
        (placement not in (Placement.ZIGZAG, Placement.CONTIGUOUS), "tokens are dealt head-tail"),
        _divides(problem, (2 if balanced else 1) * problem.cp, "2 x cp" if balanced else "cp"),
    )
    balancer = "headtail" if balanced else "none"
    return FrameworkSetting(
        framework=Framework.TORCHTITAN,
        text=f"parallelism.context_parallel_degree={problem.cp}, context_parallel_rotate_method="
        f"{rotate}, load balancer {balancer}",
        refusal=_first(rules),
        source="torchtitan b5bcd76, config; torch.distributed.tensor.experimental.context_parallel",
    )


# DeepSpeed -----------------------------------------------------------------------------------


def deepspeed(problem: Problem) -> FrameworkSetting:
    """Return DeepSpeed's setting of heads that are traded, as ALST has them."""
    q, kv, cp = problem.heads_q, problem.heads_kv, problem.cp
    rules = (
        # Source: DeepSpeed, ulysses_sp.py, lines 146-150
        (q % cp != 0, f"query heads ({q}) must be a multiple of cp ({cp})"),
        (bool(kv % cp and cp % kv), f"KV heads ({kv}) must divide cp ({cp}) or be a multiple"),
        _divides(problem, cp, "cp"),
    )
    return FrameworkSetting(
        framework=Framework.DEEPSPEED,
        text=f"UlyssesSPAttentionHF.register_with_transformers(sequence_parallel_size={cp})",
        refusal=_first(rules),
        source="DeepSpeed, runtime/sequence_parallel/ulysses_sp.py, lines 146-150",
    )


# Packages of attention alone, which also run as rows of our tables ----------------------------


def packaged(problem: Problem, function: str, text: str) -> FrameworkSetting:
    """Return the setting of a function of ring-flash-attn or yunchang.

    Args:
        problem: The problem.
        function: Its name among the peers, such as `yunchang/ulysses`, with degrees.
        text: Its call.
    """
    chosen = peer(PREFIX + function)
    refusal = ""
    try:
        refuse(chosen, problem)
    except UnsupportedError as error:
        refusal = error.reason
    ours = function.startswith(Framework.YUNCHANG)
    return FrameworkSetting(
        framework=Framework.YUNCHANG if ours else Framework.RING_FLASH_ATTENTION,
        text=text,
        refusal=refusal,
        source=f"{chosen.peer.source}, {chosen.peer.version}",
    )
