"""A calibration: every fitted parameter of one cluster, where it was fitted, and how well.

One TOML file per cluster in `harness/clusters`; each line of a parameter says its source and date.
A file of the same form at any path serves as well, so a user can bring a cluster. A time beyond the
fitted range is still given, but marked: see `Calibration.inside`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from harness.base.files import read_text
from harness.base.json_fields import refused
from harness.base.toml_text import from_toml
from harness.cluster.calibration_rules import is_name, judge_errors, judge_section
from harness.cluster.effects import Eager, Effects
from harness.cluster.kernel_model import BackwardKernel, ForwardKernel, Kernels
from harness.cluster.link_model import Crowd, Curve, Links
from harness.cluster.validated import ValidatedClass, validated_of
from harness.plan.problem import Dtype

T = TypeVar("T")
LINEAR_EFFICIENCY = 0.7
"""Assumed: large GEMMs reach about 70 % of the peak."""
FOLDER = Path(__file__).with_name("calibrations")


class PeakRates:
    """Dense peaks of matrix products by precision, of whatever has these three fields."""

    __slots__ = ()
    flops_per_s: float
    flops_per_s_float32: float
    flops_per_s_float64: float

    def peak_flops_per_s(self, dtype: Dtype) -> float:
        """Dense peak of one precision."""
        match dtype:
            case Dtype.FLOAT64:
                return self.flops_per_s_float64
            case Dtype.FLOAT32:
                return self.flops_per_s_float32
            case Dtype.BFLOAT16 | Dtype.FLOAT16:
                return self.flops_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware(PeakRates):
    """Datasheet values of a cluster and its GPU, or of another processor that ranks run on.

    Attributes:
        gpu: Model.
        device: `cuda`; or `cpu`, where ranks are processes that run this harness's interpreter.
        nodes: How many.
        gpus_per_node: Of each; one rank each.
        cores: With `cpu`, how many all ranks of all nodes share; None: one each, or GPUs.
        flops_per_s: Dense peak of bfloat16 and float16 products.
        flops_per_s_float32: Of float32 products.
        flops_per_s_float64: Of float64 products.
        memory_bytes: Capacity of one GPU.
        host_bytes_per_s: Its link to the host's memory, per direction.
    """

    gpu: str
    device: str
    nodes: int
    gpus_per_node: int
    flops_per_s: float
    flops_per_s_float32: float
    flops_per_s_float64: float
    memory_bytes: int
    host_bytes_per_s: float
    cores: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Where kernels and links were measured; beyond it a prediction extrapolates.

    Attributes:
        min_tokens: Fewest queries or keys of a kernel call.
        max_tokens: Most.
        heads: Numbers of heads; between them the model interpolates.
        head_dims: Widths.
        dtypes: Precisions.
        max_message_bytes: Largest message.
    """

    min_tokens: int
    max_tokens: int
    heads: tuple[int, ...]
    head_dims: tuple[int, ...]
    dtypes: tuple[str, ...]
    max_message_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """All that is known of one cluster.

    Attributes:
        id: Name and date: goes into every record.
        hardware: Datasheet values.
        kernels: The attention kernels.
        links: The links.
        effects: The effects of whole runs.
        range: Where it was fitted.
        errors: Expected share of error of single calls and messages: `kernel_forward`,
            `kernel_backward`, `near` and `far`.
        validated: Errors of whole plans, class by class.
    """

    id: str
    hardware: Hardware
    kernels: Kernels
    links: Links
    effects: Effects
    range: Range
    errors: Mapping[str, float]
    validated: tuple[ValidatedClass, ...] = ()

    def __hash__(self) -> int:
        """Hash by id."""
        return hash(self.id)

    @property
    def name(self) -> str:
        """Name of the cluster."""
        return self.id.partition("/")[0]

    @property
    def on_gpus(self) -> bool:
        """Whether ranks are GPUs."""
        return self.hardware.device == "cuda"

    @property
    def peak_flops_per_s(self) -> float:
        """Dense peak of the precision in which kernels were measured."""
        return self.hardware.peak_flops_per_s(Dtype(self.range.dtypes[0]))

    def inside(self, tokens: tuple[int, ...], heads: int, head_dim: int) -> bool:
        """Whether kernel calls of these lengths lie where kernels were measured."""
        low, high = self.range.min_tokens, self.range.max_tokens
        within = min(self.range.heads) <= heads <= max(self.range.heads)
        return all(low <= n <= high for n in tokens) and within and head_dim in self.range.head_dims


def load(path: Path) -> Calibration:
    """Read a calibration.

    Raises:
        ValueError: The file is missing, lacks a parameter, has one that is unknown, or a value
            that the parameter cannot have.
    """
    try:
        body = from_toml(read_text(path))
    except OSError as error:
        raise ValueError(f"calibration ({path}) cannot be read: {error.strerror}") from None
    except ValueError as error:  # no TOML, or no UTF-8
        raise ValueError(f"calibration ({path}) cannot be read: {error}") from None
    try:
        return _calibration(body)
    except KeyError as error:
        raise ValueError(
            f"calibration ({path.name}) must have every parameter; it lacks {error}"
        ) from None
    except (TypeError, AttributeError) as error:  # a value where a table must be, among others
        raise ValueError(f"calibration ({path.name}) must have every parameter: {error}") from None
    except ValueError as error:
        raise ValueError(f"calibration ({path.name}): {error}") from None


def _calibration(body: Mapping[str, Any]) -> Calibration:
    if not is_name(body["id"]):
        raise refused("id", body["id"], "a name and a date, as in mine/2026-01-01")
    kernels, links, effects = body["kernels"], body["links"], dict(body["effects"])
    near, far, eager = effects.pop("near"), effects.pop("far"), effects.pop("eager")
    judge_errors(body["errors"])
    value = Calibration(
        id=body["id"],
        hardware=_made("hardware", Hardware, body["hardware"]),
        kernels=kernels_of(kernels),
        links=_made(
            "links",
            Links,
            {name: _made(f"links.{name}", Curve, curve) for name, curve in links.items()},
        ),
        effects=_made(
            "effects",
            Effects,
            {
                **effects,
                "near": _made("effects.near", Crowd, near),
                "far": _made("effects.far", Crowd, far),
                "eager": _made("effects.eager", Eager, eager),
            },
        ),
        range=range_of(body["range"]),
        errors=body["errors"],
        validated=validated_of(body.get("validated", {}).get("classes", [])),
    )
    low, high = value.range.min_tokens, value.range.max_tokens
    if low > high:
        raise ValueError(f"range.min_tokens ({low}) must be at most range.max_tokens ({high})")
    return value


def kernels_of(body: Mapping[str, Any]) -> Kernels:
    """Kernels from their sections.

    Raises:
        KeyError, TypeError, ValueError: As `load` says of a file.
    """
    parts = {
        "forward": _made("kernels.forward", ForwardKernel, body["forward"]),
        "backward": _made("kernels.backward", BackwardKernel, body["backward"]),
    }
    return _made("kernels", Kernels, {**body, **parts})


def range_of(body: Mapping[str, Any]) -> Range:
    """A range from its section; raises as `kernels_of`."""
    return _made("range", Range, {k: _frozen(v) for k, v in body.items()})


@cache
def calibration(name: str) -> Calibration:
    """Return the calibration that ships under a name.

    Raises:
        ValueError: No calibration ships under that name.
    """
    return load(FOLDER / f"{name}.toml")


def _frozen(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _made(section: str, kind: type[T], values: Mapping[str, object]) -> T:
    unknown = set(values) - {field.name for field in fields(cast("type", kind))}
    if unknown:
        raise TypeError(f"{section} does not know {', '.join(sorted(unknown))}")
    judge_section(section, kind, values)
    return kind(**values)


def dump(value: Calibration, sources: Mapping[str, str]) -> str:
    """Write a calibration as TOML, each parameter with its source.

    Args:
        value: The calibration to write.
        sources: By section (`kernels.forward`, ...) or line (`hardware.nodes`, ...), what it cites;
            `` for all others.
    """
    lines: list[str] = [f'id = "{value.id}"']

    def section(name: str, body: object, skip: tuple[str, ...] = ()) -> None:
        lines.append(f"\n[{name}]")
        source = sources.get(name, sources[""])
        for field in fields(cast("type", body)):
            if field.name not in skip and getattr(body, field.name) is not None:
                own = sources.get(f"{name}.{field.name}", source)
                lines.append(f"{field.name} = {_text(getattr(body, field.name))}  # {own}")

    section("hardware", value.hardware)
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
    lines.append(validated_text(value.validated, sources.get("validated", source)))
    return "\n".join(lines) + "\n"


def validated_text(validated: Sequence[ValidatedClass], source: str) -> str:
    """The section of validated classes, one a line; empty if there are none.

    Args:
        validated: The classes.
        source: What they cite.
    """
    if not validated:
        return ""
    lines = ["", "[validated]", f"classes = [  # {source}"]
    for one in validated:
        values = (f"{f.name} = {_text(getattr(one, f.name))}" for f in fields(ValidatedClass))
        lines.append(f"    {{ {', '.join(values)} }},  # {source}")
    return "\n".join([*lines, "]"])


def _text(value: object) -> str:
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False)
        case bool():
            return str(value).lower()
        case float():
            return f"{value:.4g}" if value else "0.0"
        case tuple():
            return "[" + ", ".join(map(_text, value)) + "]"
        case _:
            return str(value)
