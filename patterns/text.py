"""Patterns by name: `name:key=value,key=value` to a `Pattern` and back."""

import re
from collections.abc import Mapping
from functools import lru_cache
from pkgutil import resolve_name

from patterns import outside
from patterns.kind import Kind, Values, integer
from patterns.pattern import LONGEST, Pattern

PATTERNS: Mapping[str, Kind] = {
    name: resolve_name(f"patterns.{where}")
    for name, where in {
        "full": "dense:FULL_KIND",
        "causal": "dense:CAUSAL_KIND",
        "window": "dense:WINDOW",
        "prefix_lm": "prefixes:PREFIX_LM",
        "lambda": "prefixes:LAMBDA",
        "causal_blockwise": "prefixes:CAUSAL_BLOCKWISE",
        "shared_question": "prefixes:SHARED_QUESTION",
        "documents": "documents:DOCUMENTS",
        "varlen_block_causal": "documents:VARLEN_BLOCK_CAUSAL",
        "random_topk": "selection:RANDOM_TOPK",
        "strided": "tables:STRIDED",
        "strided_original": "tables:STRIDED_ORIGINAL",
        "global_local": "tables:GLOBAL_LOCAL",
        "star": "tables:STAR",
        "streaming": "tables:STREAMING",
        "table": "tables:TABLE",
    }.items()
}
"""Name, and file and name in it; one a line."""


def make_pattern(
    text: str, seqlen_q: int, seqlen_kv: int | None = None, *, cross: bool = False
) -> Pattern:
    """Return the pattern that `text` names, for sequences of the given lengths.

    The pattern's own `text` is canonical: parameters in a fixed order, defaults left out.

    Args:
        text: `name` or `name:key=value,key=value`, e.g. `star:blocks=8`, where the name may be a
            `Kind` of another package, e.g. `mypkg.mymask:PATTERN`.
        seqlen_q: Query tokens, 1 .. 2**30.
        seqlen_kv: Key tokens, 1 .. 2**30; `seqlen_q` if left out.
        cross: Allow `seqlen_q != seqlen_kv` (cross-attention).

    Raises:
        ValueError: For an unknown name or parameter, a value outside its rule, unequal lengths
            without `cross`.
    """
    name, kind, rest = _named(text)
    seqlen_q = integer("seqlen_q", seqlen_q)
    seqlen_kv = seqlen_q if seqlen_kv is None else integer("seqlen_kv", seqlen_kv)
    _check_lengths(name, kind, seqlen_q, seqlen_kv, cross)
    values = _values(name, kind, rest)
    mask = kind.build(values, seqlen_q, seqlen_kv)
    return Pattern(
        text=_canonical(name, kind, values),
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        bands=mask.bands,
        predicate=mask.predicate,
        remap=mask.remap,
    )


def file_of(text: str) -> str | None:
    """Return the file that a pattern is read from; None if it is not read from a file.

    Raises:
        ValueError: For an unknown name or parameter, as `make_pattern` does.
    """
    return _values(*_named(text)).get("file")


@lru_cache(maxsize=64)
def is_spelled_out(pattern: Pattern) -> bool:
    """Whether a pattern's text and lengths alone make it: not a file, and not a hand."""
    try:
        if file_of(pattern.text) is not None:
            return False
        again = make_pattern(pattern.text, pattern.seqlen_q, pattern.seqlen_kv, cross=True)
    except ValueError:
        return False
    return again.content == pattern.content


def _named(text: str) -> tuple[str, Kind, str]:
    """Return a pattern's name, its kind, and its parameters, which are still to be read."""
    name, rest = outside.split_name(text.strip(), PATTERNS, outside.PATTERN_GROUP)
    name = name.strip()
    return name, kind_of(name), rest


def kind_of(name: str) -> Kind:
    """Find a pattern by its name without parameters.

    Raises:
        ValueError: The name is unknown, or what it names cannot be imported.
    """
    if name in PATTERNS:
        return PATTERNS[name]
    try:
        found = outside.find(name, outside.PATTERN_GROUP, Kind)
    except ValueError as error:
        other = outside.ways_out(PATTERNS, outside.PATTERN_GROUP)
        raise ValueError(f"pattern ({name}) {error}; {other}") from None
    if found is None:
        known = ", ".join([*PATTERNS, *outside.registered(outside.PATTERN_GROUP)])
        near = outside.did_you_mean(name, PATTERNS)
        raise ValueError(f"unknown pattern {name!r}{near}; choose one of {known}")
    return found


def sampled(text: str, seqlen: int) -> str:
    """Return a pattern's text with the parameters with which it is checked, if it has none.

    Raises:
        ValueError: For an unknown name.
    """
    name, kind, rest = _named(text)
    parameters = "" if rest or kind.sample is None else kind.sample(seqlen)
    return f"{name}:{parameters}" if parameters else text


def _check_lengths(name: str, kind: Kind, seqlen_q: int, seqlen_kv: int, cross: bool) -> None:
    for side, length in (("seqlen_q", seqlen_q), ("seqlen_kv", seqlen_kv)):
        if not 1 <= length <= LONGEST:
            raise ValueError(f"{name}: {side} ({length}) must be in 1..{LONGEST} tokens; try 4096")
    if seqlen_q == seqlen_kv:
        return
    unequal = f"{name}: seqlen_q ({seqlen_q}) differs from seqlen_kv ({seqlen_kv})"
    if not kind.cross:
        raise ValueError(f"{unequal}, but has no meaning for cross-attention; use equal lengths")
    if not cross:
        raise ValueError(
            f"{unequal}, but self-attention needs equal lengths; pass cross=True for "
            "cross-attention"
        )


def _values(name: str, kind: Kind, rest: str) -> Values:
    """Read `key=value,key=value`; a comma that no `key=` follows belongs to the value."""
    given: dict[str, str] = {}
    for part in re.split(r",(?=\s*\w+\s*=)", rest) if rest.strip() else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in kind.parameters or key in given:
            known = ", ".join(kind.parameters) or "none"
            raise ValueError(
                f"{name}: {part.strip()!r} must be key=value with each key once; keys of {name}: "
                f"{known}"
            )
        try:
            given[key] = kind.parameters[key].canonical(value)
        except ValueError as error:
            raise ValueError(f"{name}: {key} ({value}) {error}") from None
    values = {}
    for key, parameter in kind.parameters.items():
        value = given.get(key, parameter.default)
        if value is None and parameter.instead in given:
            continue
        if value is None:
            other = "" if parameter.instead is None else f" or {name}:{parameter.instead}=..."
            raise ValueError(
                f"{name}: {key} is missing and has no default; add {name}:{key}=...{other}"
            )
        values[key] = value
    return values


def _canonical(name: str, kind: Kind, values: Values) -> str:
    changed = [
        f"{key}={values[key]}"
        for key, p in kind.parameters.items()
        if key in values and values[key] != p.default
    ]
    return f"{name}:{','.join(changed)}" if changed else name
