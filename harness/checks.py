"""Run many check cells: side by side on the cores here, then in teams of real processes."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path

import torch

from harness.check import SEEDS, Cell, Status, check, group_digests, same_bits
from harness.config import Config
from harness.pool import Team, WorkerError
from harness.problem import Direction
from harness.workers import spread

_TIMEOUT_S = 300.0
_FEW = 8


def cost(config: Config) -> float:
    """How long a cell takes, relative to others: its pairs, widths and heads."""
    pairs = config.seqlen_q * config.seqlen_kv * config.batch * config.heads_q
    return pairs * (config.head_dim + 16) + 1e6 * config.cp


def check_all(configs: Iterable[Config], *, jobs: int) -> Iterator[tuple[Cell, Cell]]:
    """Judge configurations on the local transport.

    Args:
        configs: Cells; the two directions of each are judged. Neighbours that share a problem
            share its oracle.
        jobs: Processes side by side; 1 stays in this one.

    Yields:
        The forward and the backward cell of each configuration, as they finish.
    """
    if jobs == 1:
        torch.set_num_threads(1)
        for config in configs:
            yield check(config)
        return
    for pairs in spread(_check_few, _together(configs), jobs=jobs, lost=_lost, start=_one_thread):
        yield from pairs


def dearest_first(configs: Iterable[Config]) -> list[Config]:
    """Order cells so that no long one is left alone at the end."""
    return sorted(configs, key=cost, reverse=True)


def _together(configs: Iterable[Config]) -> Iterator[list[Config]]:
    """Hand out neighbours that share an oracle together, a few at a time."""
    for _, group in groupby(configs, key=_shared):
        while few := list(islice(group, _FEW)):
            yield few


def _shared(config: Config) -> Config:
    return replace(config, strategy="", cp=1)


def _one_thread() -> None:
    torch.set_num_threads(1)


def _check_few(configs: Sequence[Config]) -> list[tuple[Cell, Cell]]:
    return [check(config) for config in configs]


def _lost(configs: Sequence[Config]) -> list[tuple[Cell, Cell]]:
    return [_both_failed(config, "the process that ran it died") for config in configs]


def _both_failed(config: Config, reason: str) -> tuple[Cell, Cell]:
    forward, backward = (
        Cell(replace(config, direction=direction), Status.FAILED, reason) for direction in Direction
    )
    return forward, backward


def group_all(
    cells: Sequence[tuple[Cell, Cell]], *, repeat: int = 1, timeout_s: float = _TIMEOUT_S
) -> Iterator[tuple[Cell, Cell]]:
    """Run judged cells again in gloo processes and ask for the same bits.

    Args:
        cells: What `check_all` gave; refused cells pass through.
        repeat: How often each runs.
        timeout_s: How long one run may take.

    Yields:
        The cells with the verdict of the processes.
    """
    for cp in sorted({forward.config.cp for forward, _ in cells}):
        team: Team | None = None
        try:
            for forward, backward in cells:
                if forward.config.cp != cp:
                    continue
                if forward.status is Status.REFUSED:
                    yield forward, backward
                    continue
                if team is None or not team.alive:
                    team = Team(cp)
                yield _in_team(team, forward, backward, repeat, timeout_s)
        finally:
            if team is not None:
                team.close()


def _in_team(
    team: Team, forward: Cell, backward: Cell, repeat: int, timeout_s: float
) -> tuple[Cell, Cell]:
    for _ in range(repeat):
        try:
            answers = team.run(group_digests, timeout_s, forward.config, SEEDS[0])
        except WorkerError as error:
            reason = f"{error.kind.value}: {error}"
            return _failed(forward, reason), _failed(backward, reason)
        forward = same_bits(forward, [answer[Direction.FORWARD] for answer in answers])
        backward = same_bits(backward, [answer[Direction.BACKWARD] for answer in answers])
    return forward, backward


def _failed(cell: Cell, reason: str) -> Cell:
    return Cell(cell.config, Status.FAILED, reason, cell.max_rel_error, cell.tolerances)


class Progress:
    """Cells already judged, kept in a file so that a long check can be resumed.

    Args:
        path: One JSON record a line; a torn last line is dropped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[str, dict[str, object]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue
                self.records[record["config_hash"]] = record

    def done(self, config: Config) -> bool:
        """Whether both directions of a configuration are there and did not fail."""
        return all(
            self.records.get(hash_of(config, direction), {}).get("status")
            in (Status.PASSED, Status.REFUSED)
            for direction in Direction
        )

    def add(self, cell: Cell) -> None:
        """Append one cell, in one write."""
        record = {**cell.record(), "config_hash": cell.config.hash}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.records[cell.config.hash] = record


def hash_of(config: Config, direction: Direction) -> str:
    """Hash of a configuration in one direction."""
    return replace(config, direction=direction).hash


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
