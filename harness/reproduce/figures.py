"""Published figures beside ours: read from tables that cite them, computed anew, and judged."""

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from harness.cluster.machine import Cluster
from harness.cluster.presets import cluster
from harness.memory.ledger import trade_buffers
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.tasks import Collective, CollectiveKind
from harness.proved.plans import proved
from harness.training.attention_memory import attention_held, layer_program
from harness.training.footprint import footprint, max_context, on_cluster
from harness.training.models import Model, model
from harness.training.stack import Column, counting
from harness.training.step_time import step_time
from patterns import make_pattern
from strategies import strategy

_GIB = 2**30
_K = 2**10
PAPERS = ("upipe",)
"""Papers whose figures are claimed; each has a file in `harness/published`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One published number and ours.

    Attributes:
        table: Name of its table.
        what: Which strategy, at which length.
        published: As published; None if it is a prediction.
        ours: Computed here.
        tolerance: Share by which ours may be off; 0 asks for the same number.
        source: Where it is published.
        seen: The part that was in view when ours was fitted or chosen; empty if none was.
    """

    table: str
    what: str
    published: float | None
    ours: float
    tolerance: float
    source: str
    seen: str = ""

    @property
    def error(self) -> float | None:
        """Ours over published, less 1."""
        return None if self.published is None else self.ours / self.published - 1

    @property
    def holds(self) -> bool | None:
        """Whether ours is as published; None for a prediction."""
        if self.error is None:
            return None
        return abs(self.error) <= self.tolerance + 1e-9  # a ratio of equal numbers


def figures(paper: str, only: str = "") -> Iterator[Figure]:
    """Yield the figures of a paper, table by table; those of tables whose name has `only` in it.

    Raises:
        ValueError: No figures of such a paper are claimed.
    """
    for table in tables(paper):
        if only in table["name"]:
            yield from _figures(table)


def tables(paper: str) -> Sequence[Mapping[str, Any]]:
    """Return the published tables of a paper, as they are in its file.

    Raises:
        ValueError: No figures of such a paper are claimed.
    """
    if paper not in PAPERS:
        raise ValueError(f"paper ({paper}) is unknown; choose from {', '.join(PAPERS)}")
    text = (files("harness.reproduce") / "published" / f"{paper}.toml").read_text(encoding="utf-8")
    found: Sequence[Mapping[str, Any]] = tomllib.loads(text)["table"]
    return found


def _figures(table: Mapping[str, Any]) -> Iterator[Figure]:
    def figure(what: str, published: float | None, ours: float) -> Figure:
        return Figure(
            table=table["name"],
            what=what,
            published=published,
            ours=ours,
            tolerance=table["tolerance"],
            source=table["source"],
            seen=table.get("seen", ""),
        )

    kind = table["what"]
    if kind == "saved":
        for name, published in table["rows"]:
            yield figure(name, published, saved(name))
        return
    shape, machine = model(table["model"]), cluster(table["cluster"])
    for name, row in table["rows"]:
        if kind == "context":
            found = max_context(shape, on_cluster(name, machine), machine)
            yield figure(name, row, found.tokens / _K)
        elif kind == "collectives":
            for direction, published in zip(Direction, row, strict=True):
                count = all_to_alls(shape, name, machine, direction)
                yield figure(f"{name}, {direction.value}", published, count)
        else:
            at: Mapping[str, float | None] = row or {str(n): None for n in table["predict"]}
            for length, published in at.items():
                ours = _AT[kind](shape, name, machine, int(length) * _K)
                yield figure(f"{name}, {length} K", published, ours)


# Ours ---------------------------------------------------------------------------------------


def throughput(shape: Model, name: str, machine: Cluster, seqlen: int) -> float:
    """Tokens per second and GPU of a training step."""
    time = step_time(shape, on_cluster(name, machine), machine, seqlen)
    return seqlen / machine.gpus / time.seconds


def ratio(shape: Model, names: str, machine: Cluster, seqlen: int) -> float:
    """Throughput of `a/b`: of a over that of b."""
    one, other = (throughput(shape, name, machine, seqlen) for name in names.split("/"))
    return one / other


def peak_gib(shape: Model, name: str, machine: Cluster, seqlen: int) -> float:
    """Peak of a GPU, as released."""
    return footprint(shape, on_cluster(name, machine), machine, seqlen).peak_bytes / _GIB


def attention_gib(shape: Model, name: str, machine: Cluster, seqlen: int) -> float:
    """Memory of attention at its backward peak, as released (GiB)."""
    chosen = on_cluster(name, machine)
    held = attention_held(
        shape,
        chosen,
        machine.gpus,
        machine.gpus_per_node,
        seqlen,
        counting(Column.RELEASED, chosen),
    )
    return sum(held.backward.values()) / _GIB


_AT: Mapping[str, Callable[[Model, str, Cluster, int], float]] = {
    "throughput": throughput,
    "ratio": ratio,
    "peak": peak_gib,
    "attention": attention_gib,
}


def all_to_alls(shape: Model, name: str, machine: Cluster, direction: Direction) -> int:
    """All-to-alls of one layer, counted in its plan."""
    program = layer_program(
        shape, name, machine.gpus, machine.gpus_per_node, _K * machine.gpus, direction
    )
    return sum(
        isinstance(task, Collective) and task.kind is CollectiveKind.ALL_TO_ALL
        for task in program.plan.tasks
    )


@lru_cache
def saved(text: str) -> float:
    """Share of buffers that UPipe saves over Ulysses; `64/8 U=8 cp=8` names heads, U and ranks."""
    heads, stage, ranks = text.split()
    query, kv = map(int, heads.split("/"))
    cp = int(ranks.removeprefix("cp="))
    problem = Problem(
        pattern=make_pattern("causal", _K * cp),
        heads_q=query,
        heads_kv=kv,
        head_dim=128,
        dtype=Dtype.BFLOAT16,
        cp=cp,
        hidden=query * 128,
    )
    ours, theirs = (
        trade_buffers(proved(strategy(name), problem, Direction.FORWARD))[0]
        for name in (f"upipe:stage_heads={stage.removeprefix('U=')}", "ulysses")
    )
    return 1 - ours / theirs
