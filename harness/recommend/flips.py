"""Where the answer flips: other lengths, fewer or more ranks, slower and faster links.

The answer flips where it is no longer among what cannot be told apart. It is looked for among the
best of the fastest few strategies here, and at other degrees among all candidates of these.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from harness.cluster.machine import Cluster, LinkClass
from harness.cluster.presets import measured
from harness.errors import UnsupportedError
from harness.recommend.choose import Choice, choose_among, distinct
from harness.recommend.price import MANY_RANKS, Priced, price
from harness.recommend.question import Asked
from harness.records.cell import Share

_FAMILIES, _FEW_FAMILIES = 4, 2
"""Strategies that are looked at elsewhere, each with its best options here; of many ranks fewer."""
_LENGTHS = (1 / 4, 4)
_DEGREES = (1 / 2, 2)
_SPEEDS = (0.5, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """One place where another strategy is better.

    Attributes:
        axis: `seqlen`, `cp`, or the links: `nic` between nodes, `nvlink` inside a node.
        value: Tokens, ranks, or how many times as fast the links are.
        strategy: What is better there; None if nothing runs.
        time_s: Its time there.
        kept_time_s: Time there of the answer here; None if it does not run there.
    """

    axis: str
    value: float
    strategy: str | None
    time_s: Share | None
    kept_time_s: Share | None


def flips_of(question: Asked, choice: Choice, priced: Sequence[Priced]) -> list[Flip]:
    """Look where the answer flips; places where the problem cannot be asked are left out."""
    fastest = _fastest(priced, choice, question.cp)
    found = []
    for axis, value, other, names in _places(question, fastest):
        there, _ = price(other, names)
        best = choose_among(there, other.memory_bytes)
        if best is not None and _same(choice.best, (best.best, *best.ties)):
            continue
        kept = [one.time_s for one in there if _same(choice.best, (one,))]
        found.append(
            Flip(
                axis=axis,
                value=float(value),
                strategy=None if best is None else best.best.strategy,
                time_s=None if best is None else best.best.time_s,
                kept_time_s=min(kept, default=None),
            )
        )
    return found


def _fastest(priced: Sequence[Priced], choice: Choice, cp: int) -> list[str]:
    """The answer, and the fastest of each other strategy, as they are typed."""
    found: dict[str, str] = {_family(choice.best.strategy): choice.best.strategy}
    for one in sorted(distinct(priced), key=lambda one: one.time_s):
        found.setdefault(_family(one.strategy), one.strategy)
    return list(found.values())[: _FEW_FAMILIES if cp >= MANY_RANKS else _FAMILIES]


def _family(text: str) -> str:
    return text.partition(":")[0]


def _same(answer: Priced, others: Sequence[Priced]) -> bool:
    """Whether the answer is among others; at another degree a mesh is spelled otherwise."""
    return answer.strategy in {one.strategy for one in others}


def _places(
    question: Asked, names: Sequence[str]
) -> Iterator[tuple[str, float, Asked, Sequence[str]]]:
    """Yield axes, values, the question there, and the candidates there."""
    for factor in _LENGTHS:
        tokens = round(question.seqlen * factor)
        if (other := _asked(question, seqlen=tokens)) is not None:
            yield "seqlen", tokens, other, names
    families = {_family(name) for name in names}
    for factor in _DEGREES:
        cp = round(question.cp * factor)
        if cp >= 2 and (other := _asked(question, cp=cp)) is not None:
            own = [name for name in other.candidates() if _family(name) in families]
            yield "cp", cp, other, own
    link = LinkClass.NVLINK if question.cp <= question.machine.gpus_per_node else LinkClass.NIC
    for speed in _SPEEDS:
        machine = with_speed(question.machine, link, speed)
        yield link.value, speed, replace(question, machine=machine), names


def _asked(question: Asked, **other: int) -> Asked | None:
    """The question elsewhere; None where it cannot be asked."""
    try:
        return question.at(**other)
    except (ValueError, UnsupportedError):
        return None


def with_speed(machine: Cluster, link: LinkClass, speed: float) -> Cluster:
    """Return a cluster whose links of one class are so many times as fast; its error is unknown."""
    near = link is LinkClass.NVLINK
    fitted = machine.fitted
    if fitted is None:
        own = machine.link(link)
        faster = replace(own, bandwidth_bytes_per_s=own.bandwidth_bytes_per_s * speed)
        return replace(machine, nvlink=faster) if near else replace(machine, nic=faster)
    known = fitted.links.near if near else fitted.links.far
    changed = replace(known, bytes_per_s=known.bytes_per_s * speed)
    links = replace(fitted.links, **{"near" if near else "far": changed})
    return measured(replace(fitted, links=links, errors={}))
