"""Jobs for worker processes that go wrong in every way."""

import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

from harness.base.time_limit import OverTime, time_limit
from harness.ranks.team import Member


def ranks(member: Member, base: int) -> int:
    return 10 * base + member.rank


def pid(member: Member) -> int:
    del member
    return os.getpid()


def fail(member: Member, rank: int) -> None:
    if member.rank == rank:
        raise KeyError("the missing shard")
    dist.barrier()


def leave(member: Member, rank: int, status: int) -> None:
    if member.rank == rank:
        sys.exit(status)
    dist.barrier()


def die(member: Member, rank: int, number: int) -> None:
    if member.rank == rank:
        os.kill(os.getpid(), number)
    dist.barrier()


def hang(member: Member, rank: int) -> None:
    if member.rank == rank:
        time.sleep(600)


def grow(member: Member, rank: int) -> None:
    """Take memory without end, touching all of it."""
    kept = []
    while member.rank == rank:
        kept.append(b"x" * 2**24)
        time.sleep(0.002)


def unsendable(member: Member) -> object:
    del member
    return lambda: None


def square(number: int) -> int:
    return number * number


def square_or_die(number: int) -> int:
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def square_or_raise(number: int) -> int:
    if number == 5:
        raise ValueError("five")
    return number * number


def stay(path: str) -> int:
    """Say who works, then work for long."""
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)
    return 0


def endless_if_odd(number: int) -> int:
    """Return its number, or minus it where the work never ends and has a limit of time."""
    try:
        with time_limit(0.2):
            while number % 2:
                time.sleep(0.01)
    except OverTime:
        return -number
    return number
