"""A suite: which cells a sweep runs, read from TOML or from flags."""

from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from importlib.resources import files
from itertools import product
from pathlib import Path

from harness.base.files import read_text
from harness.base.toml_text import from_toml
from harness.cluster.machine import Runtime
from harness.cluster.presets import DEFAULT_CLUSTER
from harness.plan.problem import Direction, Dtype
from harness.plan.tasks import Scope
from harness.planning.peers import expanded
from harness.records import defaults
from harness.records.config import Config, Where
from strategies import AUTO, DIRECT, EVERY_STRATEGY, STRATEGIES, comparable, strategy

EVERY = "*"
RULES = "direct"


class Mode(StrEnum):
    """Where the numbers of a sweep come from."""

    SIMULATE = "simulate"
    MEASURE = "measure"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One product of values.

    Attributes:
        mode: Simulated or measured (a part is one of the two).
        strategies: Names with options; `*` is every strategy as it is worth comparing (see
            `strategies.comparable`), `auto` what is recommended (which whoever runs the cells
            settles), `direct` all that do not search for their plans, with their
            defaults, `peer:*` every peer.
        patterns: Texts of patterns.
        cp: Degrees.
        seqlen: Tokens over all ranks.
        heads: (query heads, KV heads).
        head_dim: Widths of q, k and v.
        batch: Sequences side by side.
        dtype: Precisions.
        direction: Forward, backward.
        cluster: Names of clusters, or paths of calibrations; for simulated parts.
        runtime: How work reaches the GPUs; for simulated parts.
        scope: Attention, or whole layers; `*` is every strategy of the scope.
        hidden: Model widths of layers; None is as wide as all query heads.
        rotary: Bases of their rotary angles; None is without.
    """

    mode: Mode
    strategies: tuple[str, ...] = (EVERY,)
    patterns: tuple[str, ...] = (defaults.PATTERN,)
    cp: tuple[int, ...] = (defaults.CP,)
    seqlen: tuple[int, ...] = (defaults.SEQLEN,)
    heads: tuple[tuple[int, int], ...] = ((defaults.HEADS_Q, defaults.HEADS_KV),)
    head_dim: tuple[int, ...] = (defaults.HEAD_DIM,)
    batch: tuple[int, ...] = (1,)
    dtype: tuple[Dtype, ...] = (defaults.DTYPE,)
    direction: tuple[Direction, ...] = tuple(Direction)
    cluster: tuple[str, ...] = (DEFAULT_CLUSTER,)
    runtime: tuple[Runtime, ...] = (Runtime.GRAPH,)
    scope: tuple[Scope, ...] = (Scope.ATTENTION,)
    hidden: tuple[int | None, ...] = (None,)
    rotary: tuple[float | None, ...] = (None,)

    def names(self, scope: Scope, cp: int) -> tuple[str, ...]:
        """Strategies on so many ranks with `*` spelled out, in canonical spelling."""
        every = STRATEGIES if scope is Scope.ATTENTION else EVERY_STRATEGY
        listed = tuple(strategy(text).text for text in comparable(cp, every))
        rules = tuple(name for name in every if name in DIRECT)
        groups = {EVERY: listed, RULES: rules, AUTO: (AUTO,)}
        return expanded(self.strategies, lambda text: groups.get(text) or (strategy(text).text,))

    def cells(self) -> Iterator[Config]:
        """Yield the product, one configuration a cell."""
        machines: list[tuple[str | None, Runtime | None]] = list(
            product(self.cluster, self.runtime)
        )
        where = Where.SIMULATED
        if self.mode is Mode.MEASURE:
            machines, where = [(None, None)], Where.GLOO
        for scope in self.scope:
            yield from self._cells(scope, machines, where)

    def _cells(
        self, scope: Scope, machines: Sequence[tuple[str | None, Runtime | None]], where: Where
    ) -> Iterator[Config]:
        layer = scope is Scope.LAYER
        models = list(product(self.hidden, self.rotary)) if layer else [(None, None)]
        for machine, cp, seqlen, heads, head_dim, batch, dtype, pattern, direction in product(
            machines,
            self.cp,
            self.seqlen,
            self.heads,
            self.head_dim,
            self.batch,
            self.dtype,
            self.patterns,
            self.direction,
        ):
            for name, (hidden, rotary) in product(self.names(scope, cp), models):
                yield Config(
                    strategy=name,
                    pattern=pattern,
                    cp=cp,
                    seqlen_q=seqlen,
                    seqlen_kv=seqlen,
                    heads_q=heads[0],
                    heads_kv=heads[1],
                    head_dim=head_dim,
                    batch=batch,
                    dtype=dtype,
                    direction=direction,
                    transport=where,
                    cluster=machine[0],
                    runtime=machine[1],
                    scope=scope,
                    hidden=hidden,
                    rotary=rotary,
                )


Overrides = Mapping[str, Sequence[object]]


def override(part: Part, values: Overrides) -> Part:
    """Replace the axes of a part that the user named."""
    known = {item.name for item in fields(Part)}
    axes = {key: tuple(each) for key, each in values.items() if key in known}
    return replace(part, **axes)  # type: ignore[arg-type]  # the command line read each


def load_suite(name: str, readers: Mapping[str, object]) -> tuple[Part, ...]:
    """Read a suite by name, or from a TOML file.

    Args:
        name: Name of a suite that comes with the harness, or a path that ends in `.toml`.
        readers: Per axis, a function from text to a value.

    Raises:
        ValueError: The suite is unknown, or has an unknown key or value.
    """
    text = _text(name)
    try:
        body = from_toml(text)
    except ValueError as error:
        raise ValueError(f"suite ({name}) is not TOML: {error}") from None
    parts = body.get("part")
    tables = isinstance(parts, list) and all(isinstance(part, dict) for part in parts)
    if set(body) != {"part"} or not tables or not parts:
        raise ValueError(f"suite ({name}) must be a list of [[part]] tables and nothing else")
    return tuple(_part(name, raw, readers) for raw in parts)


def names() -> list[str]:
    """Names of the suites that come with the harness."""
    folder = files("harness.sweep") / "suites"
    return sorted(
        item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml")
    )


def _text(name: str) -> str:
    if name.endswith(".toml"):
        path = Path(name)
        if not path.exists():
            raise ValueError(f"suite file ({name}) does not exist")
        try:
            return read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"suite file ({name}) cannot be read: {error}") from None
    if name not in names():
        raise ValueError(f"suite ({name}) is unknown; choose from {', '.join(names())}")
    return (files("harness.sweep") / "suites" / f"{name}.toml").read_text()


def _part(name: str, raw: Mapping[str, object], readers: Mapping[str, object]) -> Part:
    known = [item.name for item in fields(Part)]
    values: dict[str, object] = {}
    for key, value in raw.items():
        if key not in known:
            raise ValueError(f"suite ({name}): key ({key}) is unknown; use {', '.join(known)}")
        if key == "mode":
            if value not in (Mode.SIMULATE, Mode.MEASURE):
                raise ValueError(f"suite ({name}): mode ({value}) must be simulate or measure")
            values[key] = Mode(str(value))
            continue
        if not isinstance(value, list) or not value:
            raise ValueError(f"suite ({name}): {key} must be a list of values")
        read = readers.get(key, str)
        assert callable(read)
        try:
            values[key] = tuple(read(str(item)) for item in value)
        except (ValueError, ArgumentTypeError) as error:
            raise ValueError(f"suite ({name}): {key}: {error}") from None
    if "mode" not in values:
        raise ValueError(f"suite ({name}): a part needs mode = simulate or measure")
    return Part(**values)  # type: ignore[arg-type]  # the readers made each value's type
