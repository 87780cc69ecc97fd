"""Other projects' implementations, as rows beside our strategies: names, and what each cannot do.

A peer is an installed package that is called as its users call it, with its own sharding. It has no
plan, so it can be measured and checked but not simulated, explained or traced. Its code is neither
in this project nor changed by it. What it would refuse by an assertion deep inside, or compute
wrongly without a word, is refused here with the reason.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec

from harness.base.numbers import whole_number
from harness.errors import UnsupportedError
from harness.plan.problem import Dtype, Problem
from patterns import is_spelled_out

PREFIX = "peer:"
_HALF = (Dtype.BFLOAT16, Dtype.FLOAT16)
_TEXTS = ("full", "causal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One function of one package.

    Attributes:
        package: Name of its distribution.
        module: The module to import.
        function: Name after the slash.
        summary: One line for lists.
        source: Where its code is published.
        version: The version that this was written for.
        causal_only: It has no form without a causal mask.
        refusal: Why it cannot run here at all; empty where it can.
    """

    package: str
    module: str
    function: str
    summary: str
    source: str
    version: str
    causal_only: bool = False
    refusal: str = ""

    @property
    def name(self) -> str:
        """Name as a user types it."""
        return f"{PREFIX}{self.package}/{self.function}"

    @property
    def installed(self) -> bool:
        """Whether its package is there; says nothing of whether it works."""
        return find_spec(self.module) is not None

    @property
    def install(self) -> str:
        """The command that installs it, without the CUDA packages that it may ask for."""
        return f"pip install --no-deps {self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class ChosenPeer:
    """A peer with its degrees, as a user spelled it.

    Attributes:
        peer: Which.
        ulysses: Degree of its head axis; None lets `degrees` choose.
        ring: Degree of its ring axis; as above.
    """

    peer: Peer
    ulysses: int | None = None
    ring: int | None = None

    @property
    def text(self) -> str:
        """Canonical spelling."""
        degrees = f":{self.ulysses}x{self.ring}" if self.ulysses else ""
        return self.peer.name + degrees

    def degrees(self, problem: Problem) -> tuple[int, int]:
        """(Ulysses, ring) degrees: as asked, else the largest head axis that leaves a ring."""
        match self.peer.function:
            case "ulysses":
                return problem.cp, 1
            case "usp-zigzag" if self.ulysses and self.ring:
                return self.ulysses, self.ring
            case "usp-zigzag":
                smaller = range(1, problem.cp)
                fitting = [u for u in smaller if problem.cp % u == problem.heads_kv % u == 0]
                u = max(fitting, default=1)
                return u, problem.cp // u
            case _:
                return 1, problem.cp

    def partial_results(self, problem: Problem) -> int:
        """How many partial results meet in one accumulator: what its tolerance grows with."""
        # The one that gathers attends keys before its own and its own apart, and joins the two.
        return 2 if self.peer.function == "llama3" else self.degrees(problem)[1]


def _ring_flash_attn(function: str, summary: str, *, causal_only: bool = False) -> Peer:
    return Peer(
        package="ring-flash-attn",
        module="ring_flash_attn",
        function=function,
        summary=summary,
        source="github.com/zhuzilin/ring-flash-attention",
        version="0.1.8",
        causal_only=causal_only,
    )


def _yunchang(function: str, summary: str, *, causal_only: bool = False) -> Peer:
    return Peer(
        package="yunchang",
        module="yunchang",
        function=function,
        summary=summary,
        source="github.com/feifeibear/long-context-attention",
        version="0.6.4",
        causal_only=causal_only,
    )


_ALL = (
    _ring_flash_attn("ring", "ring_flash_attn_func"),
    _ring_flash_attn("zigzag", "zigzag_ring_flash_attn_func", causal_only=True),
    _ring_flash_attn("stripe", "stripe_flash_attn_func", causal_only=True),
    _ring_flash_attn("llama3", "llama3_flash_attn_varlen_func, one KV head at a time"),
    _yunchang("ulysses", "UlyssesAttention"),
    _yunchang("usp-zigzag", "LongContextAttention(ring_impl_type='zigzag')", causal_only=True),
    Peer(
        package="torch",
        module="torch",
        function="context-parallel",
        summary="context_parallel",
        source="github.com/pytorch/pytorch",
        version="2.13.0",
        refusal="it supports the CUDA attention operators only; torch 2.13.0 raises "
        "NotImplementedError for aten._scaled_dot_product_flash_attention_for_cpu",
    ),
)

PEERS = {peer.name: peer for peer in _ALL}
"""Every peer, by name."""


def is_peer(text: str) -> bool:
    """Whether a strategy's name is a peer's, or a pattern of peers' names."""
    return text.startswith(PREFIX)


def spelled_peer(text: str) -> tuple[str, ...]:
    """Canonical spellings of a peer's name or a pattern of names, such as `peer:*`.

    Raises:
        ValueError: No peer has such a name, or its degrees are none; the choices are listed.
    """
    if "*" not in text:
        return (peer(text).text,)
    found = tuple(name for name in PEERS if fnmatchcase(name, text))
    if not found:
        raise ValueError(f"strategy ({text}) matches no peer; choose from {', '.join(PEERS)}")
    return found


def expanded(texts: Iterable[str], own: Callable[[str], Iterable[str]]) -> tuple[str, ...]:
    """Spell out a list of strategies and peers, each once.

    Args:
        texts: As a user typed them.
        own: Canonical spellings of what is no peer.
    """
    return tuple(
        dict.fromkeys(
            name for text in texts for name in (spelled_peer(text) if is_peer(text) else own(text))
        )
    )


def peer(text: str) -> ChosenPeer:
    """Read a peer's name, with degrees where it takes some: `peer:yunchang/usp-zigzag:2x2`.

    Raises:
        ValueError: Unknown name or wrong degrees; the choices are listed.
    """
    name, _, degrees = text.removeprefix(PREFIX).partition(":")
    name = PREFIX + name
    if name not in PEERS:
        raise ValueError(f"strategy ({text}) is unknown; choose from {', '.join(PEERS)}")
    if not degrees:
        return ChosenPeer(PEERS[name])
    u, _, r = degrees.partition("x")
    if not name.endswith("/usp-zigzag"):
        raise ValueError(f"strategy ({text}): only usp-zigzag takes degrees; leave {degrees} out")
    try:
        return ChosenPeer(PEERS[name], whole_number(u), whole_number(r))
    except ValueError as error:
        rule = f"must be like 2x2 (Ulysses x ring); each {error}"
        raise ValueError(f"strategy ({text}): degrees ({degrees}) {rule}") from None


def refuse(chosen: ChosenPeer, problem: Problem) -> None:
    """Refuse what a peer cannot do.

    Raises:
        UnsupportedError: With the reason and what is near and legal.
    """
    for wrong, reason, nearest in _rules(chosen, problem):
        if wrong:
            raise UnsupportedError(f"{chosen.text}: {reason}", nearest)


_Rule = tuple[bool, str, tuple[str, ...]]


def _rules(chosen: ChosenPeer, problem: Problem) -> Iterable[_Rule]:
    own, cp = chosen.peer, problem.cp
    yield bool(own.refusal), own.refusal, ("a strategy of the harness",)
    yield (
        problem.hidden is not None,
        "it computes attention only, not a layer",
        ("scope attention",),
    )
    yield cp == 1, "cp (1) must be at least 2", ("cp=2",)
    yield from _numbers(own, problem)
    yield from _mask(own, problem)
    yield from _heads(chosen, problem)
    yield from _lengths(chosen, problem)


def _numbers(own: Peer, problem: Problem) -> Iterable[_Rule]:
    dtypes = tuple(dtype.value for dtype in _HALF)
    yield (
        problem.dtype not in _HALF,
        f"dtype ({problem.dtype.value}) must be {' or '.join(dtypes)}, as flash-attn's; and in "
        "float32 its .to(float32) is no copy, so gradients would be overwritten",
        dtypes,
    )
    yield (
        problem.head_dim != problem.head_dim_v,
        f"head_dim of v ({problem.head_dim_v}) must be that of q ({problem.head_dim})",
        (),
    )
    changed = [x for x in ("scale", "softcap", "alibi") if getattr(problem, x) is not None]
    yield (
        bool(changed),
        f"{', '.join(changed)} must be left out: it is called with its own defaults",
        (),
    )
    yield (
        own.function == "llama3" and problem.batch != 1,
        f"batch ({problem.batch}) must be 1: its packed form has no batch",
        ("batch=1",),
    )


def _mask(own: Peer, problem: Problem) -> Iterable[_Rule]:
    text = problem.pattern.text
    legal = ("causal",) if own.causal_only else _TEXTS
    yield (
        problem.seqlen_q != problem.seqlen_kv,
        f"seqlen_kv ({problem.seqlen_kv}) must be seqlen_q ({problem.seqlen_q})",
        (),
    )
    yield (
        text.startswith("window"),
        f"pattern ({text}): it passes a window on to each block, where positions start anew, so "
        "results would be wrong on more than one rank",
        legal,
    )
    yield text not in legal, f"pattern ({text}) must be {' or '.join(legal)}", legal
    yield (
        not is_spelled_out(problem.pattern),
        f"pattern ({text}) must be what its text says, and this one was made by hand",
        legal,
    )


def _heads(chosen: ChosenPeer, problem: Problem) -> Iterable[_Rule]:
    u, r = chosen.degrees(problem)
    yield u * r != problem.cp, f"{u} x {r} must be cp ({problem.cp})", ()
    yield (
        r == 1 and chosen.peer.function != "ulysses",
        "ring degree (1) must be at least 2: a ring of one sends to itself",
        ("peer:yunchang/ulysses",),
    )
    yield (
        bool(problem.heads_q % u or problem.heads_kv % u),
        f"heads ({problem.heads_q}/{problem.heads_kv}) must both be multiples of the Ulysses "
        f"degree ({u}); it would drop what is left over",
        (f"heads={u}/{u}",),
    )


def _lengths(chosen: ChosenPeer, problem: Problem) -> Iterable[_Rule]:
    u, r = chosen.degrees(problem)
    zigzag = chosen.peer.function in ("zigzag", "usp-zigzag")
    unit = 2 * r * u if zigzag else problem.cp
    below = problem.seqlen_q - problem.seqlen_q % unit
    near = tuple(f"seqlen={length}" for length in (below, below + unit) if length)
    rule = f"2 x cp ({unit})" if zigzag else f"cp ({unit})"
    wrong = bool(problem.seqlen_q % unit)
    yield wrong, f"seqlen ({problem.seqlen_q}) must be a multiple of {rule}", near
