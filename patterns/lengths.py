"""Lengths of packed documents: as typed, or drawn from a named distribution.

A distribution is a fit with few parameters that a public source states; nothing of its data is
here. Draws fill the sequence in order, and the last document is cut where the sequence ends, as
packing into fixed lengths cuts it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log
from random import Random
from statistics import NormalDist

from patterns.kind import Parameter, Values, digits, whole_parameter
from patterns.pattern import LONGEST

_MOST_SEED = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """Tokens whose logarithm is normal, kept within bounds.

    Attributes:
        mean: Of the distribution before it is bounded, tokens.
        sigma: Standard deviation of the natural logarithm.
        least: Shorter ones become this.
        most: Longer ones become this.
    """

    mean: float
    sigma: float
    least: int
    most: int

    def quantile(self, share: float) -> int:
        """Tokens that a share of all documents, 0 < share < 1, do not exceed."""
        mu = log(self.mean) - self.sigma**2 / 2
        tokens = round(exp(NormalDist(mu, self.sigma).inv_cdf(share)))
        return min(max(tokens, self.least), self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential:
    """Tokens with a known mean and nothing else known: the distribution of largest entropy.

    Real documents are spread wider than that.
    """

    mean: float

    def quantile(self, share: float) -> int:
        """Tokens that a share of all documents, 0 < share < 1, do not exceed."""
        return max(round(-self.mean * log(1 - share)), 1)


def _pile(kib: float) -> Exponential:
    """Fit the mean of a part of the Pile.

    Args:
        kib: Its mean document size, KiB: Gao et al., arXiv:2101.00027, table 1.
    """
    per_byte = 0.29335  # GPT-2 tokens per byte of the Pile: arXiv:2101.00027, section 3.1
    return Exponential(mean=kib * 1024 * per_byte)


PRESETS: Mapping[str, Lognormal | Exponential] = {
    # Megatron-LM, examples/dynamic_context_parallel/README.md: its workload, and "more skewed"
    "megatron": Lognormal(mean=1024, sigma=1.5, least=128, most=8192),
    "megatron_skewed": Lognormal(mean=768, sigma=1.8, least=128, most=8192),
    "pile": _pile(5.91),  # arXiv:2101.00027, table 1, all
    "pile_arxiv": _pile(46.61),  # as above, ArXiv
    "pile_books": _pile(398.73),  # as above, Gutenberg (PG-19)
    "pile_github": _pile(5.25),  # as above, Github
    "pile_web": _pile(4.33),  # as above, Pile-CC
    "pile_wikipedia": _pile(1.11),  # as above, Wikipedia (en)
}
"""Distributions of document lengths, by the name that is typed."""


def drawn(preset: str, seed: int, seqlen: int) -> list[int]:
    """Draw lengths that fill a sequence; the same in every process.

    Args:
        preset: One of `PRESETS`.
        seed: Of the draw.
        seqlen: Tokens to fill.

    Returns:
        Lengths >= 1 that sum to `seqlen`.
    """
    random, quantile = Random(seed), PRESETS[preset].quantile
    lengths = []
    while seqlen > 0:
        share = (int(random.random() * (1 << 32)) + 0.5) / (1 << 32)  # never 0, never 1
        lengths.append(min(quantile(share), seqlen))
        seqlen -= lengths[-1]
    return lengths


def lengths_of(values: Values, kind: str, seqlen: int, padding: int = 0) -> list[int]:
    """Return the documents' lengths that the parameters of a pattern say.

    Args:
        values: With those of `PACK`.
        kind: Name of the pattern, for messages.
        seqlen: Tokens.
        padding: Those of them that belong to no document.

    Raises:
        ValueError: Lengths do not sum to the sequence length, or both ways are given.
    """
    if values["preset"] and "lengths" in values:
        raise ValueError(
            f"{kind}: lengths and preset ({values['preset']}) both say how long documents are; "
            "leave one out"
        )
    if values["preset"]:
        if padding >= seqlen:
            raise ValueError(
                f"{kind}: padding ({padding}) must leave a document of the sequence ({seqlen}); "
                f"try padding={max(seqlen - 1, 0)}"
            )
        return drawn(values["preset"], int(values["seed"]), seqlen - padding)
    lengths = [int(part) for part in values["lengths"].split("+")]
    total = sum(lengths) + padding
    if total != seqlen:
        gap = f"add a document of {seqlen - total}" if total < seqlen else "shorten a document"
        what = "lengths and padding" if padding else "lengths"
        raise ValueError(
            f"{kind}: {what} sum to {total}, which must equal the sequence length ({seqlen}); {gap}"
        )
    return lengths


def over_seeds(text: str, count: int) -> tuple[str, ...]:
    """Return a pattern that draws its lengths from a distribution once for each of so many seeds.

    One that names a seed, or draws nothing, stays as it is.
    """
    if "preset=" not in text or "seed=" in text:
        return (text,)
    return tuple(f"{text},seed={seed}" for seed in range(count))


def without_seed(text: str) -> str | None:
    """Return a pattern that draws its lengths without the seed; None if it draws none."""
    name, _, typed = text.partition(":")
    if "preset=" not in typed:
        return None
    kept = (each for each in typed.split(",") if not each.startswith("seed="))
    return f"{name}:{','.join(kept)}"


def sample_lengths(seqlen: int) -> str:
    """Lengths with which a pattern is checked: a third or so, one token, and the rest."""
    first = seqlen * 2 // 7
    rest = [first, 1, seqlen - first - 1] if first and seqlen - first > 1 else [seqlen]
    return "lengths=" + "+".join(map(str, rest))


def _lengths(value: str) -> str:
    parts = [part.strip() for part in value.split("+")]
    lengths = [digits(part) for part in parts]
    if not all(length is not None and 1 <= length <= LONGEST for length in lengths):
        raise ValueError(f"must be whole numbers in 1..{LONGEST} joined by +; try 5+11+48")
    return "+".join(map(str, lengths))


def _preset(value: str) -> str:
    if value not in PRESETS:
        raise ValueError(f"must be one of {', '.join(PRESETS)}")
    return value


PACK: Mapping[str, Parameter] = {
    "lengths": Parameter(default=None, canonical=_lengths, instead="preset"),
    "preset": Parameter(default="", canonical=_preset),
    "seed": whole_parameter(0, least=0, most=_MOST_SEED),
}
"""The parameters of patterns over packed documents."""
