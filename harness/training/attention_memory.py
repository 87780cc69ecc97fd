"""Memory of attention in one block of a model, per rank, at any length: the ledger, scaled.

There is one truth, the ledger of the plan. All that it counts is proportional to tokens once the
weights are counted elsewhere, so a plan of few tokens tells the bytes of many. Where a strategy has
parts of a fixed length, what it holds grows by the same amount with each, so two plans tell the
rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from harness.memory.counting import Counting, Use
from harness.memory.ledger import Ledger, ledger
from harness.plan.problem import Direction
from harness.plan.residency import Program
from harness.plan.sizes import piece_bytes
from harness.plan.tasks import Memory
from harness.planning.chosen import Chosen
from harness.planning.strategy import Context
from harness.proved.plans import proved_once
from harness.training.models import Model
from strategies import strategy

_TOKENS = 2048  # of a rank in the plan that is scaled; each strategy cuts them evenly
_PART = 64  # of a rank's part in the plans that are scaled
_FEW = 8  # parts up to which plans are not extended; from 6 on each adds as much


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes on the fullest rank.

    Attributes:
        forward: At the peak of forward, by use.
        backward: At the peak of backward, by use.
        saved: Bytes that forward leaves on the device for backward.
        host: Peak in host memory.
        host_forward: The same, of forward alone.
    """

    forward: Mapping[Use, int]
    backward: Mapping[Use, int]
    saved: int
    host: int
    host_forward: int


def layer_program(
    model: Model, text: str, cp: int, gpus_per_node: int, seqlen: int, direction: Direction
) -> Program:
    """Plan and prove a layer of a model."""
    context = Context(gpus_per_node=gpus_per_node)
    return proved_once(strategy(text), model.layer(cp, seqlen), direction, context)


def attention_held(
    model: Model, chosen: Chosen, cp: int, gpus_per_node: int, seqlen: int, counting: Counting
) -> Held:
    """Return the memory of attention in one block.

    Args:
        model: The model.
        chosen: The strategy.
        cp: Ranks.
        gpus_per_node: Ranks that share a node.
        seqlen: Tokens, over all ranks.
        counting: How memory is counted; weights must be counted elsewhere.

    Raises:
        UnsupportedError: The strategy cannot do it.
    """
    assert Use.WEIGHTS in counting.apart  # they do not grow with tokens
    parts = fixed_parts(model, chosen, cp, gpus_per_node, seqlen)
    if parts is not None:
        return _in_parts(model, chosen, cp, gpus_per_node, seqlen, counting, parts=parts)
    at = _TOKENS * cp
    whole = _held(model, chosen.text, cp, gpus_per_node, at, counting)
    return _scaled(whole, Fraction(seqlen, at))


def fixed_parts(
    model: Model, chosen: Chosen, cp: int, gpus_per_node: int, seqlen: int
) -> int | None:
    """Return how many parts of a fixed length a plan has.

    Returns:
        None where its parts are no fixed length: it has none, or was told how many.
    """
    grows = chosen.strategy.training.grows
    if grows is None or getattr(chosen.options, grows) is not None:
        return None
    context = Context(gpus_per_node=gpus_per_node)
    filled = chosen.resolved(model.layer(cp, seqlen), Direction.FORWARD, context)
    parts: int = getattr(filled.options, grows)
    return parts


def with_parts(chosen: Chosen, count: int) -> Chosen:
    """Return a strategy whose plan has parts of a fixed length with so many of them."""
    grows = chosen.strategy.training.grows
    assert grows is not None  # its parts were counted
    return replace(chosen, options=replace(chosen.options, **{grows: count}))


def _in_parts(
    model: Model,
    chosen: Chosen,
    cp: int,
    gpus_per_node: int,
    seqlen: int,
    counting: Counting,
    *,
    parts: int,
) -> Held:
    scale = Fraction(seqlen, parts * cp * _PART)

    def held(count: int) -> Held:
        text = with_parts(chosen, count).text
        return _held(model, text, cp, gpus_per_node, count * cp * _PART, counting)

    if parts <= _FEW:
        return _scaled(held(parts), scale)
    one, two = held(_FEW - 1), held(_FEW)
    more = parts - _FEW

    def line(first: int, second: int) -> int:
        return second + more * (second - first)

    def uses(first: Mapping[Use, int], second: Mapping[Use, int]) -> Mapping[Use, int]:
        return {use: line(first[use], second[use]) for use in Use}

    return _scaled(
        Held(
            forward=uses(one.forward, two.forward),
            backward=uses(one.backward, two.backward),
            saved=line(one.saved, two.saved),
            host=line(one.host, two.host),
            host_forward=line(one.host_forward, two.host_forward),
        ),
        scale,
    )


@lru_cache(maxsize=512)
def _held(
    model: Model, text: str, cp: int, gpus_per_node: int, seqlen: int, counting: Counting
) -> Held:
    forward, backward = (
        layer_program(model, text, cp, gpus_per_node, seqlen, direction) for direction in Direction
    )
    # Forward starts from x, which nobody else holds then.
    own = replace(counting, apart=counting.apart - {Use.INPUT})
    books = ledger(forward, own), ledger(backward, counting)
    saved = [0] * cp
    for place, piece in forward.plan.saved:
        if place.memory is Memory.DEVICE:
            saved[place.rank] += piece_bytes(forward.plan, piece)
    return Held(
        forward=_fullest(books[0]),
        backward=_fullest(books[1]),
        saved=max(saved),
        host=max(peak for book in books for peak in book.host_peak_bytes),
        host_forward=max(books[0].host_peak_bytes),
    )


def _fullest(book: Ledger) -> Mapping[Use, int]:
    return book.uses_bytes[book.peak_bytes.index(max(book.peak_bytes))]


def _scaled(held: Held, scale: Fraction) -> Held:
    def uses(found: Mapping[Use, int]) -> Mapping[Use, int]:
        return {use: round(size * scale) for use, size in found.items()}

    return Held(
        forward=uses(held.forward),
        backward=uses(held.backward),
        saved=round(held.saved * scale),
        host=round(held.host * scale),
        host_forward=round(held.host_forward * scale),
    )
