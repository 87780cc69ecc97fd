"""Run many check cells: side by side on the cores here, then in teams of real processes."""

import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path

import torch

from harness.base.workers import spread
from harness.check.cell import SEEDS, JudgedCell, as_group, check, group_run, pair_of
from harness.check.peers import judge_peer
from harness.errors import told
from harness.peers.run import peer_job, refusal
from harness.plan.problem import Direction
from harness.ranks.team import Team, WorkerError
from harness.records.check_record import Outcome
from harness.records.config import Config, Where

_TIMEOUT_S = 300.0
_FEW = 8
_BATCH = 64


def cost(config: Config) -> float:
    """How long a cell takes, relative to others: its pairs, widths and heads."""
    pairs = config.seqlen_q * config.seqlen_kv * config.batch * config.heads_q
    return pairs * (config.head_dim + 16) + 1e6 * config.cp


def check_all(configs: Iterable[Config], *, jobs: int) -> Iterator[tuple[JudgedCell, JudgedCell]]:
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
            yield _check_one(config)
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


def _check_few(configs: Sequence[Config]) -> list[tuple[JudgedCell, JudgedCell]]:
    return [_check_one(config) for config in configs]


def _check_one(config: Config) -> tuple[JudgedCell, JudgedCell]:
    try:
        return check(config)
    except Exception as error:  # the boundary of the cell: the others go on
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return _both_failed(config, f"{told(error)} ({where})")


def _lost(configs: Sequence[Config]) -> list[tuple[JudgedCell, JudgedCell]]:
    return [_both_failed(config, "the process that ran it died") for config in configs]


def _both_failed(config: Config, reason: str) -> tuple[JudgedCell, JudgedCell]:
    forward, backward = (
        JudgedCell(replace(config, direction=direction), Outcome.FAILED, reason)
        for direction in Direction
    )
    return forward, backward


def check_group(
    configs: Iterable[Config], *, jobs: int, repeat: int = 1, timeout_s: float = _TIMEOUT_S
) -> Iterator[tuple[JudgedCell, JudgedCell]]:
    """Judge configurations on the local transport, then in gloo processes: the same bits.

    Args:
        configs: Cells, best those of one degree together: each degree has a team of its own.
        jobs: Processes side by side in the local part.
        repeat: How often each runs in the team.
        timeout_s: How long one run may take.

    Yields:
        The cells with the verdict of both.
    """
    remaining = iter(configs)
    team: Team | None = None
    try:
        while batch := list(islice(remaining, _BATCH)):
            for forward, backward in sorted(check_all(batch, jobs=jobs), key=_degree):
                if forward.status is Outcome.REFUSED:
                    yield as_group(forward), as_group(backward)
                    continue
                cp = forward.config.cp
                if team is None or not team.alive or team.cp != cp:
                    if team is not None:
                        team.close()
                    team = Team(cp)
                yield _in_team(team, forward, backward, repeat, timeout_s)
    finally:
        if team is not None:
            team.close()


def check_peers(
    configs: Iterable[Config], *, timeout_s: float = _TIMEOUT_S
) -> Iterator[tuple[JudgedCell, JudgedCell]]:
    """Judge other projects' code, which runs in gloo processes alone, by the same oracle.

    Args:
        configs: Cells of peers, best those of one degree together.
        timeout_s: How long one run may take.
    """
    team: Team | None = None
    try:
        for config in configs:
            cells = [
                replace(config, direction=direction, transport=Where.GLOO)
                for direction in Direction
            ]
            refused = _peer_refusal(config)
            if refused is not None:
                yield pair_of(JudgedCell(cell, Outcome.REFUSED, refused) for cell in cells)
                continue
            judged = []
            for cell in cells:
                if team is None or not team.alive or team.cp != config.cp:
                    if team is not None:
                        team.close()
                    team = Team(config.cp)
                judged.append(_peer_cell(team, cell, timeout_s))
            yield pair_of(judged)
    finally:
        if team is not None:
            team.close()


def _peer_refusal(config: Config) -> str | None:
    try:
        refused = refusal(config.strategy, config.problem)
    except ValueError as error:
        return str(error)
    return None if refused is None else refused.reason


def _peer_cell(team: Team, config: Config, timeout_s: float) -> JudgedCell:
    try:
        return judge_peer(config, lambda seed: team.run(peer_job, timeout_s, config, 0, 1, seed))
    except WorkerError as error:
        reason = f"{config.strategy} itself failed: {error.kind.value}: {error}"
        return JudgedCell(config, Outcome.FAILED, reason)


def _degree(pair: tuple[JudgedCell, JudgedCell]) -> int:
    return pair[0].config.cp


def _in_team(
    team: Team, forward: JudgedCell, backward: JudgedCell, repeat: int, timeout_s: float
) -> tuple[JudgedCell, JudgedCell]:
    for number in range(repeat):
        try:
            answers = team.run(group_run, timeout_s, forward.config, SEEDS[0], account=number == 0)
        except WorkerError as error:
            reason = f"{error.kind.value}: {error}"
            failed = (
                replace(as_group(cell), status=Outcome.FAILED, reason=reason)
                for cell in (forward, backward)
            )
            return next(failed), next(failed)
        forward = as_group(forward, [answer[Direction.FORWARD] for answer in answers])
        backward = as_group(backward, [answer[Direction.BACKWARD] for answer in answers])
    return forward, backward


def hashes_of(config: Config, transport: Where) -> tuple[str, ...]:
    """Hashes of the records of a configuration, one per direction."""
    placed = replace(config, transport=transport)
    return tuple(replace(placed, direction=direction).hash for direction in Direction)
