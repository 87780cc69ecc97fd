"""A calibration: every fitted parameter of one cluster, where it was fitted, and how well.

One TOML file per cluster in `harness/clusters`; each line of a parameter says its source and date.
A time beyond the fitted range is still given, but marked: see `Calibration.inside`.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TypeVar, cast

from harness.effects import Crowd, Eager, Effects
from harness.kernel_model import BackwardKernel, ForwardKernel, Kernels
from harness.link_model import Curve, Links

T = TypeVar("T")
FOLDER = Path(__file__).with_name("clusters")


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Where kernels and links were measured; beyond it a prediction extrapolates.

    Attributes:
        min_tokens: Fewest queries or keys of a kernel call.
        max_tokens: Most.
        heads: Numbers of heads; between them the model interpolates.
        head_dims: Widths.
        max_message_bytes: Largest message.
    """

    min_tokens: int
    max_tokens: int
    heads: tuple[int, ...]
    head_dims: tuple[int, ...]
    max_message_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """All that is known of one cluster.

    Attributes:
        id: Name, date and kind: goes into every record.
        kernels: The attention kernels.
        links: The links.
        effects: The effects of whole runs.
        range: Where it was fitted.
        errors: Expected share of error by class: `kernel_forward`, `kernel_backward`, `near`,
            `far`, and `graph` and `eager` of whole plans.
    """

    id: str
    kernels: Kernels
    links: Links
    effects: Effects
    range: Range
    errors: Mapping[str, float]

    def __hash__(self) -> int:
        """Hash by id."""
        return hash(self.id)

    def inside(self, tokens: tuple[int, ...], heads: int, head_dim: int) -> bool:
        """Whether kernel calls of these lengths lie where kernels were measured."""
        low, high = self.range.min_tokens, self.range.max_tokens
        within = min(self.range.heads) <= heads <= max(self.range.heads)
        return all(low <= n <= high for n in tokens) and within and head_dim in self.range.head_dims


def load(path: Path) -> Calibration:
    """Read a calibration.

    Raises:
        ValueError: The file lacks a parameter, or has one that is unknown.
    """
    body = tomllib.loads(path.read_text(encoding="utf-8"))
    try:
        kernels, links, effects = body["kernels"], body["links"], body["effects"]
        near, far, eager = effects.pop("near"), effects.pop("far"), effects.pop("eager")
        return Calibration(
            id=body["id"],
            kernels=Kernels(
                sms=kernels["sms"],
                memory_bandwidth_bytes_per_s=kernels["memory_bandwidth_bytes_per_s"],
                forward=_made(ForwardKernel, kernels["forward"]),
                backward=_made(BackwardKernel, kernels["backward"]),
            ),
            links=_made(Links, {name: _made(Curve, curve) for name, curve in links.items()}),
            effects=_made(
                Effects,
                {
                    **effects,
                    "near": _made(Crowd, near),
                    "far": _made(Crowd, far),
                    "eager": _made(Eager, eager),
                },
            ),
            range=_made(Range, {k: _frozen(v) for k, v in body["range"].items()}),
            errors=body["errors"],
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"calibration ({path.name}) must have every parameter: {error}") from None


@cache
def calibration(name: str) -> Calibration | None:
    """Return the calibration that ships under a name, if there is one."""
    path = FOLDER / f"{name}.toml"
    return load(path) if path.exists() else None


def _frozen(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _made(kind: type[T], values: Mapping[str, object]) -> T:
    unknown = set(values) - {field.name for field in fields(cast("type", kind))}
    if unknown:
        raise TypeError(f"{kind.__name__} does not know {', '.join(sorted(unknown))}")
    return kind(**values)


def dump(value: Calibration, sources: Mapping[str, str]) -> str:
    """Write a calibration as TOML, each parameter with its source.

    Args:
        value: What to write.
        sources: By section (`kernels.forward`, `links.near`, ...), what each of its lines cites;
            `` for all others.
    """
    lines: list[str] = [f'id = "{value.id}"']

    def section(name: str, body: object, skip: tuple[str, ...] = ()) -> None:
        lines.append(f"\n[{name}]")
        source = sources.get(name, sources[""])
        for field in fields(cast("type", body)):
            if field.name not in skip:
                lines.append(f"{field.name} = {_text(getattr(body, field.name))}  # {source}")

    section("kernels", value.kernels, ("forward", "backward"))
    section("kernels.forward", value.kernels.forward)
    section("kernels.backward", value.kernels.backward)
    for field in fields(Links):
        section(f"links.{field.name}", getattr(value.links, field.name))
    section("effects", value.effects, ("near", "far", "eager"))
    for name in ("near", "far", "eager"):
        section(f"effects.{name}", getattr(value.effects, name))
    section("range", value.range)
    lines.append("\n[errors]")
    source = sources.get("errors", sources[""])
    lines += [f"{k} = {_text(v)}  # {source}" for k, v in value.errors.items()]
    return "\n".join(lines) + "\n"


def _text(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float():
            return f"{value:.4g}" if value else "0.0"
        case tuple():
            return "[" + ", ".join(map(_text, value)) + "]"
        case _:
            return str(value)
