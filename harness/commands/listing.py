"""List strategies with their options, patterns with a picture, clusters, models and precisions."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from textwrap import wrap
from typing import TypedDict

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from harness.base.json_fields import json_text
from harness.cluster.presets import CLUSTERS
from harness.commands.arguments import Help, example
from harness.commands.progress import Output
from harness.plan.problem import Dtype
from harness.plan.tasks import Scope
from harness.planning.options import COMMON_OPTIONS, LAYER_OPTIONS, Common, options_of, shown
from harness.planning.peers import PEERS
from harness.training.models import MODELS
from patterns import PATTERNS, make_pattern
from strategies import EVERY_STRATEGY

_PICTURED_TOKENS = 512
_PICTURE_COLUMNS = 16
_INDENT = 17
_SPELLING = "Options follow a colon: NAME:option=value,option=value. "


class _OptionEntry(TypedDict):
    name: str
    values: str
    default: str
    summary: str


class _StrategyEntry(TypedDict):
    name: str
    aliases: list[str]
    summary: str
    paper: str
    options: list[_OptionEntry]
    scopes: list[str]


class _PeerEntry(TypedDict):
    name: str
    calls: str
    source: str
    installed: bool
    refusal: str


class _PatternEntry(TypedDict):
    name: str
    summary: str
    parameters: dict[str, str | None]
    cross: bool
    picture: str | None


class _ClusterEntry(TypedDict):
    name: str
    gpu: str
    nodes: int
    gpus_per_node: int
    calibration: str
    errors: dict[str, float]


class _ModelEntry(TypedDict):
    name: str
    parameters: int
    layers: int
    hidden: int
    heads: str
    head_dim: int
    ffn: int
    vocab: int


class _DtypeEntry(TypedDict):
    name: str
    bytes: int
    accumulator_bytes: int


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "list",
        help="list strategies, peers, patterns, clusters, models and precisions",
        description=__doc__,
        epilog=example(["list", "list clusters", "list strategies --json"]),
        formatter_class=Help,
    )
    known = f"{', '.join(_ENTRIES)}; default: all"
    parser.add_argument("what", nargs="?", choices=list(_ENTRIES), metavar="WHAT", help=known)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what there is."""
    wanted = [args.what] if args.what else list(_ENTRIES)
    if args.json:
        body = {what: _ENTRIES[what]() for what in wanted}
        sys.stdout.write(json_text(body, indent=2) + "\n")
        return 0
    console = Output(markup=False, highlight=False)
    for what in wanted:
        _SHOWS[what](console)
    return 0


def _strategies() -> list[_StrategyEntry]:
    return [
        _StrategyEntry(
            name=name,
            aliases=list(strategy.aliases),
            summary=strategy.summary,
            paper=strategy.paper,
            options=_options(strategy.defaults),
            scopes=[s for s in Scope if s is Scope.LAYER or not strategy.layers_only],
        )
        for name, strategy in EVERY_STRATEGY.items()
    ]


def _options(values: object) -> list[_OptionEntry]:
    """The options of a dataclass of options, by name."""
    return [
        _OptionEntry(
            name=name,
            values=option.reader.values,
            default=option.unset if value is None else shown(value),
            summary=option.summary,
        )
        for name, option in sorted(options_of(values).items())
        for value in (getattr(values, name),)
    ]


def _peers() -> list[_PeerEntry]:
    return [
        _PeerEntry(
            name=peer.name,
            calls=peer.summary,
            source=peer.source,
            installed=peer.installed,
            refusal=peer.refusal,
        )
        for peer in PEERS.values()
    ]


def _patterns() -> list[_PatternEntry]:
    entries = []
    for name, kind in PATTERNS.items():
        parameters = {key: parameter.default for key, parameter in kind.parameters.items()}
        picture = None
        if None not in parameters.values():
            picture = make_pattern(name, _PICTURED_TOKENS).picture(_PICTURE_COLUMNS)
        entries.append(
            _PatternEntry(
                name=name,
                summary=kind.summary,
                parameters=parameters,
                cross=kind.cross,
                picture=picture,
            )
        )
    return entries


def _dtypes() -> list[_DtypeEntry]:
    return [
        _DtypeEntry(name=dtype.value, bytes=dtype.bytes, accumulator_bytes=dtype.accumulator_bytes)
        for dtype in Dtype
    ]


def _clusters() -> list[_ClusterEntry]:
    return [
        _ClusterEntry(
            name=c.name,
            gpu=c.gpu.name,
            nodes=c.nodes,
            gpus_per_node=c.gpus_per_node,
            calibration=c.calibration,
            errors={} if c.fitted is None else dict(c.fitted.errors),
        )
        for c in CLUSTERS.values()
    ]


def _models() -> list[_ModelEntry]:
    return [
        _ModelEntry(
            name=m.name,
            parameters=m.parameters,
            layers=m.layers,
            hidden=m.hidden,
            heads=f"{m.heads_q}/{m.heads_kv}",
            head_dim=m.head_dim,
            ffn=m.ffn,
            vocab=m.vocab,
        )
        for m in MODELS.values()
    ]


def _show_strategies(console: Output) -> None:
    console.print(Text("strategies", style="bold"))
    meshes = [
        f"{name}:4x2 is short for {name}:{mesh[0]}=4,{mesh[1]}=2 (U x R, with U x R = cp)."
        for name, mesh in ((name, each.mesh) for name, each in EVERY_STRATEGY.items())
        if mesh is not None
    ]
    console.print(_SPELLING + " ".join(meshes))
    for entry in _strategies():
        console.print()
        _beside(console, entry["name"], entry["summary"])
        if entry["aliases"]:
            _beside(console, "", f"also called {', '.join(entry['aliases'])}")
        if Scope.ATTENTION not in entry["scopes"]:
            _beside(console, "", "whole layers only: --scope layer")
        _beside(console, "", entry["paper"])
        for option in entry["options"]:
            _beside(console, f"  {option['name']}=", _said(option))
    console.print()
    common = {option["name"]: option for option in _options(Common())}
    for name, group in (
        ("also takes", COMMON_OPTIONS),
        ("and at layer scope", LAYER_OPTIONS),
    ):
        _beside(console, "any strategy", name)
        for option_name in sorted(group):
            _beside(console, f"  {option_name}=", _said(common[option_name]))


def _said(option: _OptionEntry) -> str:
    return f"{option['summary']}: {option['values']} (default: {option['default']})"


def _show_peers(console: Output) -> None:
    console.print()
    console.print(Text("peers", style="bold"))
    console.print("other projects' code, measured and checked beside ours; peer:* is all of them")
    for entry in _peers():
        here = "runs here" if entry["installed"] else PEERS[entry["name"]].install
        console.print()
        console.print(entry["name"])
        _beside(console, "", f"calls {entry['calls']}, {entry['source']}")
        _beside(console, "", f"not here: {entry['refusal']}" if entry["refusal"] else here)


def _show_patterns(console: Output) -> None:
    console.print()
    console.print(Text("patterns", style="bold"))
    console.print(f"pictured at {_PICTURED_TOKENS} tokens: queries down, keys across")
    for entry in _patterns():
        parameters = [
            f"{key} (must be given)" if default is None else f"{key}={default}"
            for key, default in entry["parameters"].items()
        ]
        console.print()
        _beside(console, entry["name"], entry["summary"])
        if parameters:
            _beside(console, "", f"parameters: {', '.join(parameters)}")
        for line in (entry["picture"] or "its picture depends on its parameters").splitlines():
            _beside(console, "", line)


def _beside(console: Output, name: str, text: str) -> None:
    """Print a name and what it says, wrapped on its own side."""
    indent = " " * _INDENT
    lines = wrap(
        text,
        console.width,
        initial_indent=name.ljust(_INDENT),
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    console.print(Text("\n".join(lines)), soft_wrap=True)


def _show_clusters(console: Output) -> None:
    console.print()
    console.print(Text("clusters", style="bold"))
    console.print("so is any .toml file that `calibrate` wrote: --cluster FILE")
    for entry in _clusters():
        plans = [v for k, v in entry["errors"].items() if k.startswith(("graph", "eager"))]
        size = f"{entry['nodes']} x {entry['gpus_per_node']} {entry['gpu']}"
        known = f"expected error {min(plans):.0%} to {max(plans):.0%}" if plans else ""
        console.print()
        _beside(console, entry["name"], size)
        _beside(console, "", entry["calibration"])
        if entry["calibration"].startswith("calibration"):
            _beside(console, "", known or _unknown(entry["name"]))


def _unknown(name: str) -> str:
    """Why the file of a calibrated cluster has no expected error of plans."""
    fitted = CLUSTERS[name].fitted
    if fitted is None or fitted.on_gpus:
        return "expected error unknown: nothing was measured on it"
    return (
        "its speeds were measured, on one machine; its file has no expected error of plans: how "
        f"far predictions missed there is in results/{name}.md, and on yours `calibrate --check` "
        "says it"
    )


def _show_models(console: Output) -> None:
    console.print()
    console.print(Text("models", style="bold"))
    console.print("or key=value pairs, alone or after a name: --model llama3-8b,layers=16")
    for entry in _models():
        shape = (
            f"{entry['parameters'] / 1e9:.2f} billion parameters, layers={entry['layers']}, "
            f"hidden={entry['hidden']}, heads={entry['heads']}, head_dim={entry['head_dim']}, "
            f"ffn={entry['ffn']}, vocab={entry['vocab']}"
        )
        _beside(console, entry["name"], shape)


def _show_dtypes(console: Output) -> None:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("dtype")
    for name in ("bytes", "bytes of partial results"):
        table.add_column(name, justify="right")
    for entry in _dtypes():
        table.add_row(entry["name"], str(entry["bytes"]), str(entry["accumulator_bytes"]))
    console.print()
    console.print(table)


_ENTRIES: Mapping[str, Callable[[], Sequence[object]]] = {
    "strategies": _strategies,
    "peers": _peers,
    "patterns": _patterns,
    "clusters": _clusters,
    "models": _models,
    "dtypes": _dtypes,
}
_SHOWS: Mapping[str, Callable[[Output], None]] = {
    "strategies": _show_strategies,
    "peers": _show_peers,
    "patterns": _show_patterns,
    "clusters": _show_clusters,
    "models": _show_models,
    "dtypes": _show_dtypes,
}
