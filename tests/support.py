"""Shared by tests: problems and their tensors, a verdict on a run of all ranks, a pool of ranks."""

import atexit
import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import strategies
from harness.attention import AllRanks, run_all
from harness.oracle.tolerance import Tolerance, Verdict, calibrate, judge
from harness.plan.problem import Dtype, Problem
from harness.plan.tasks import Scope
from harness.records.config import Config
from patterns import make_pattern

EVERY_STRATEGY = tuple(map(strategies.quick, strategies.STRATEGIES))
WAIT_S = 60


def problem(
    pattern: str = "causal",
    seqlen: int = 37,
    heads: tuple[int, int] = (6, 2),
    *,
    seqlen_kv: int | None = None,
    dims: tuple[int, int] = (8, 8),
    batch: int = 2,
    dtype: Dtype = Dtype.FLOAT64,
    cp: int = 4,
) -> Problem:
    """A small problem; every number can be chosen, none equals another by default."""
    keys = seqlen if seqlen_kv is None else seqlen_kv
    return Problem(
        pattern=make_pattern(pattern, seqlen, keys, cross=keys != seqlen),
        heads_q=heads[0],
        heads_kv=heads[1],
        head_dim=dims[0],
        head_dim_v=dims[1],
        batch=batch,
        dtype=dtype,
        cp=cp,
    )


def layer_problem(
    pattern: str = "causal",
    seqlen: int = 37,
    heads: tuple[int, int] = (6, 2),
    *,
    dims: tuple[int, int] = (8, 5),
    dtype: Dtype = Dtype.FLOAT64,
    cp: int = 2,
    rotary: float | None = 1e4,
) -> Problem:
    """A small layer; every number can be chosen, none equals another by default."""
    attention = problem(pattern, seqlen, heads, dims=dims, batch=3, dtype=dtype, cp=cp)
    return replace(attention, hidden=11, rotary=rotary)


def layer_config(
    text: str,
    pattern: str = "window:left=17,right=2",
    cp: int = 2,
    heads: tuple[int, int] = (6, 2),
    *,
    head_dim: int = 8,
    dtype: Dtype = Dtype.FLOAT64,
    rotary: float | None = 1e4,
) -> Config:
    """A small layer that a strategy is asked to do."""
    return Config(
        strategy=text,
        pattern=pattern,
        cp=cp,
        seqlen_q=37,
        seqlen_kv=37,
        heads_q=heads[0],
        heads_kv=heads[1],
        head_dim=head_dim,
        batch=3,
        dtype=dtype,
        scope=Scope.LAYER,
        hidden=11,
        rotary=rotary,
    )


def tensors(p: Problem, seed: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Global q, k, v and dout; the last is as uneven as the others."""
    rng = torch.Generator().manual_seed(seed)
    shapes = (
        (p.batch, p.heads_q, p.seqlen_q, p.head_dim),
        (p.batch, p.heads_kv, p.seqlen_kv, p.head_dim),
        (p.batch, p.heads_kv, p.seqlen_kv, p.head_dim_v),
        (p.batch, p.heads_q, p.seqlen_q, p.head_dim_v),
    )
    q, k, v, dout = (
        torch.randn(shape, generator=rng, dtype=torch.float64).to(getattr(torch, p.dtype.value))
        for shape in shapes
    )
    return q, k, v, dout


def allowed(p: Problem) -> Tensor:
    """The dense mask, from the pattern's definition."""
    pattern = p.pattern
    return torch.tensor(pattern.allowed(np.arange(p.seqlen_q), np.arange(p.seqlen_kv)))


@lru_cache(maxsize=64)
def tolerance_of(p: Problem, seed: int = 1) -> Tolerance:
    """The oracle's answer for `tensors(p, seed)`; independent of cp."""
    q, k, v, dout = tensors(p, seed)
    return calibrate(q, k, v, allowed(p), scale=p.softmax_scale, dout=dout)


def failures(p: Problem, results: Mapping[str, Tensor], seed: int = 1) -> list[Verdict]:
    """The verdicts against results for `tensors(p, seed)`."""
    verdicts = judge(results, tolerance_of(replace(p, cp=1), seed), merges=p.cp)
    return [verdict for verdict in verdicts if not verdict.passed]


def run(p: Problem, strategy: str, seed: int = 1) -> AllRanks:
    """Run all ranks of `tensors(p, seed)` in this process, forward and backward."""
    q, k, v, dout = tensors(p, seed)
    return run_all(p, strategy, q, k, v, dout=dout)


def wrong(p: Problem, strategy: str, seed: int = 1) -> str:
    """Run forward and backward on the local transport; say what differs from the oracle."""
    found = failures(p, run(p, strategy, seed).results, seed)
    return "".join(f"\n{strategy} {p}: {verdict}" for verdict in found)


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two sets of results are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class RankError(AssertionError):
    """A rank raised, died or did not answer in time."""


class Ranks:
    """Processes that are the ranks of one gloo group and run functions together.

    Args:
        cp: How many.
        timeout_s: How long a rank waits for another inside a collective or transfer.
    """

    def __init__(self, cp: int, timeout_s: float = WAIT_S) -> None:
        context = multiprocessing.get_context("spawn")
        self.cp = cp
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(cp):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, cp, store, timeout_s), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, job: Callable[..., Any], *args: object) -> list[Any]:
        """Call a module-level function on every rank at once; return what each returned.

        Raises:
            RankError: With the traceback of each rank that failed.
        """
        message = pickle.dumps((job, args))
        for pipe in self._pipes:
            pipe.send_bytes(message)
        answers, problems = [], []
        for rank, pipe in enumerate(self._pipes):
            try:
                answer, problem_text = (
                    pickle.loads(pipe.recv_bytes())
                    if pipe.poll(WAIT_S)
                    else (None, f"no answer within {WAIT_S} s")
                )
            except EOFError:
                answer, problem_text = None, "died"
            answers.append(answer)
            if problem_text:
                problems.append(f"rank {rank}: {problem_text}")
        if problems:
            raise RankError("\n".join(problems))
        return answers

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(pipe: Connection, rank: int, cp: int, store: str, timeout_s: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=cp,
        timeout=timedelta(seconds=timeout_s),
    )
    while True:
        try:
            job, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        try:
            answer = (job(*args), "")
        except Exception:  # the boundary of the process: the text goes to the test
            answer = (None, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))
    dist.destroy_process_group()


@lru_cache
def ranks(cp: int) -> Ranks:
    """The pool of so many ranks of this test process; started when first asked for."""
    pool = Ranks(cp)
    atexit.register(pool.close)
    return pool
