"""List strategies with their options, patterns with a picture, clusters, models and precisions."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from harness.base.json_fields import json_text
from harness.cluster.presets import CLUSTERS
from harness.commands.parts.list_plans import (
    beside,
    patterns,
    show_patterns,
    show_strategies,
    strategies,
)
from harness.plan.problem import Dtype
from harness.planning.peers import PEERS
from harness.terminal.arguments import Help, Verbs, example
from harness.terminal.progress import Output
from harness.training.named_models import MODELS


class _PeerEntry(TypedDict):
    name: str
    calls: str
    source: str
    installed: bool
    refusal: str


class _ClusterEntry(TypedDict):
    name: str
    gpu: str
    nodes: int
    gpus_per_node: int
    calibration: str
    errors: dict[str, float]
    kernel: str | None


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


def register(subparsers: Verbs, summary: str | None = None) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "list",
        help=summary,
        description=__doc__,
        epilog=example(
            [
                "list",
                "list clusters",
                "list strategies mypkg.myring:STRATEGY",
                "list strategies --json",
            ]
        ),
        formatter_class=Help,
    )
    known = f"{', '.join(_ENTRIES)}; default: all"
    parser.add_argument("what", nargs="?", choices=list(_ENTRIES), metavar="WHAT", help=known)
    only = "strategies or patterns to list, also of other packages (default: all)"
    parser.add_argument("names", nargs="*", metavar="NAME", help=only)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what there is."""
    wanted = [args.what] if args.what else list(_ENTRIES)
    if args.names and args.what not in _NAMED:
        raise ValueError(f"{args.what} takes no names; only {' and '.join(_NAMED)} do")
    if args.json:
        body = {what: _ENTRIES[what](args.names) for what in wanted}
        sys.stdout.write(json_text(body, indent=2) + "\n")
        return 0
    console = Output(markup=False, highlight=False)
    for what in wanted:
        _SHOWS[what](console, args.names)
    return 0


def _peers(names: Sequence[str] = ()) -> list[_PeerEntry]:
    del names
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


def _dtypes(names: Sequence[str] = ()) -> list[_DtypeEntry]:
    del names
    return [
        _DtypeEntry(name=dtype.value, bytes=dtype.bytes, accumulator_bytes=dtype.accumulator_bytes)
        for dtype in Dtype
    ]


def _clusters(names: Sequence[str] = ()) -> list[_ClusterEntry]:
    del names
    return [
        _ClusterEntry(
            name=c.name,
            gpu=c.gpu.name,
            nodes=c.nodes,
            gpus_per_node=c.gpus_per_node,
            calibration=c.calibration,
            errors={} if c.fitted is None else dict(c.fitted.errors),
            kernel=None if c.fitted is None else c.fitted.kernels.name,
        )
        for c in CLUSTERS.values()
    ]


def _models(names: Sequence[str] = ()) -> list[_ModelEntry]:
    del names
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


def _show_peers(console: Output, names: Sequence[str]) -> None:
    del names
    console.print()
    console.print(Text("peers", style="bold"))
    console.print(
        "other projects' implementations, measured and checked beside ours; peer:* selects all"
    )
    for entry in _peers():
        here = "runs here" if entry["installed"] else PEERS[entry["name"]].install
        console.print()
        console.print(entry["name"])
        beside(console, "", f"calls {entry['calls']}, {entry['source']}")
        beside(console, "", f"not here: {entry['refusal']}" if entry["refusal"] else here)


def _show_clusters(console: Output, names: Sequence[str]) -> None:
    del names
    console.print()
    console.print(Text("clusters", style="bold"))
    console.print("a .toml file that `calibrate` wrote is a cluster too: --cluster FILE")
    for entry in _clusters():
        fitted = CLUSTERS[entry["name"]].fitted
        plans = [] if fitted is None else [one.mean for one in fitted.validated]
        size = f"{entry['nodes']} x {entry['gpus_per_node']} {entry['gpu']}"
        known = (
            f"expected error {min(plans):.0%} to {max(plans):.0%}, in {len(plans)} classes of plans"
            if plans
            else ""
        )
        console.print()
        beside(console, entry["name"], size)
        beside(console, "", entry["calibration"])
        if entry["calibration"].startswith("calibration"):
            beside(console, "", f"kernel {entry['kernel']}")
            beside(console, "", known or _unknown(entry["name"]))


def _unknown(name: str) -> str:
    """Reason why the file of a calibrated cluster has no expected error of plans."""
    fitted = CLUSTERS[name].fitted
    if fitted is None or fitted.on_gpus:
        return "expected error unknown: nothing was measured on it"
    return (
        "speeds measured on one machine; the file has no expected error of plans: see "
        f"results/{name}.md for the errors there, and run `calibrate --check` for yours"
    )


def _show_models(console: Output, names: Sequence[str]) -> None:
    del names
    console.print()
    console.print(Text("models", style="bold"))
    console.print("or key=value pairs, alone or after a name: --model llama3-8b,layers=16")
    for entry in _models():
        shape = (
            f"{entry['parameters'] / 1e9:.2f} billion parameters, layers={entry['layers']}, "
            f"hidden={entry['hidden']}, heads={entry['heads']}, head_dim={entry['head_dim']}, "
            f"ffn={entry['ffn']}, vocab={entry['vocab']}"
        )
        beside(console, entry["name"], shape)


def _show_dtypes(console: Output, names: Sequence[str]) -> None:
    del names
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("dtype")
    for name in ("bytes", "bytes of partial results"):
        table.add_column(name, justify="right")
    for entry in _dtypes():
        table.add_row(entry["name"], str(entry["bytes"]), str(entry["accumulator_bytes"]))
    console.print()
    console.print(table)


_ENTRIES: Mapping[str, Callable[[Sequence[str]], Sequence[object]]] = {
    "strategies": strategies,
    "peers": _peers,
    "patterns": patterns,
    "clusters": _clusters,
    "models": _models,
    "dtypes": _dtypes,
}
_NAMED = ("strategies", "patterns")
_SHOWS: Mapping[str, Callable[[Output, Sequence[str]], None]] = {
    "strategies": show_strategies,
    "peers": _show_peers,
    "patterns": show_patterns,
    "clusters": _show_clusters,
    "models": _show_models,
    "dtypes": _show_dtypes,
}
