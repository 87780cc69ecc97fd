"""How the ranks of a launch meet: the store that they share, and the secret that none else knows.

Where all ranks are on one node, the store listens on the loopback interface alone, and the secret
goes through memory of rank 0 that only processes of the same user can open. Over several nodes the
launcher's own store is used, which listens on every interface. There the secret is what
CPBENCH_TOKEN says on every node; without it rank 0 leaves one in the store, which tells a launch
from another and from what was left behind, but keeps out nobody who can reach the store.
"""

import ipaddress
import os
import re
import secrets
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from harness.base.json_fields import json_text, parsed
from harness.errors import MeasurementError
from harness.ranks.team import LOOPBACK

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
_TOKEN = "CPBENCH_TOKEN"
_MEETING = timedelta(seconds=300)
_SILENT_S = 10.0
_HOST = "127.0.0.1"
_MEMORY = "cpbench-launch"
_MOST_SECRET = 4096
_WHERE = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,6}")


@dataclass(frozen=True, slots=True)
class Met:
    """A rank's place in its launch.

    Attributes:
        store: Shared by all ranks.
        secret: Signs what they say.
        rank: Of this process.
        world: How many there are.
        local_rank: Its number on its node; None if no launcher says it.
        local_world: How many there are on its node; None as above.
    """

    store: "Store"
    secret: bytes
    rank: int
    world: int
    local_rank: int | None
    local_world: int | None


def launched() -> bool:
    """Whether a launcher has started this process as one of several ranks."""
    return all(os.environ.get(name) for name in VARIABLES)


def meet() -> Met:
    """Meet the other ranks of the launch.

    Raises:
        MeasurementError: They do not come, or the variables of the launcher contradict one another.
    """
    rank, world, port = (_number(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if not rank < world:
        raise MeasurementError(f"RANK ({rank}) must be less than WORLD_SIZE ({world})")
    host = os.environ["MASTER_ADDR"]
    local_rank, local_world = (_first(names) for names in (_LOCAL_RANK, _LOCAL_SIZE))
    one_node = _loopback(host) if local_world is None else local_world == world
    if local_rank is None and one_node:
        local_rank = rank
    late = threading.Timer(_SILENT_S, _say_waiting, (rank, world, host, port))
    late.daemon = True
    late.start()
    try:
        store = _first_store(rank, world, host, port)
        secret = os.environ.get(_TOKEN, "").encode()
        if one_node:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
            store, secret = _loopback_store(store, rank, world, secret)
        elif not secret:
            secret = _left_in(store, rank)
        store.set(f"cpbench/met/{rank}", "")
        if rank == 0:  # its store may go with it: all must have come before it can
            store.wait([f"cpbench/met/{other}" for other in range(world)], _MEETING)
    except (RuntimeError, OSError) as error:
        raise MeasurementError(
            f"rank {rank} of {world} did not meet the others at {host}:{port}: {error}; without a "
            f"launcher, unset {', '.join(VARIABLES)}"
        ) from error
    finally:
        late.cancel()
    return Met(store, secret, rank, world, local_rank, local_world)


def _number(name: str) -> int:
    text = os.environ[name]
    if not (text.isascii() and text.isdigit() and len(text) < 7):
        raise MeasurementError(f"{name} ({text!r}) must be a whole number, as launchers set it")
    return int(text)


def _first(names: tuple[str, ...]) -> int | None:
    return next((_number(name) for name in names if os.environ.get(name)), None)


def _loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _say_waiting(rank: int, world: int, host: str, port: int) -> None:
    sys.stderr.write(
        f"rank {rank} of {world} waits at {host}:{port} for the others; without a launcher, unset "
        f"{', '.join(VARIABLES)}\n"
    )


def _first_store(rank: int, world: int, host: str, port: int) -> "Store":
    """The launcher's store; or one of rank 0, which hides from other machines if it may."""
    from torch.distributed.rendezvous import rendezvous

    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if agent or not _loopback(host):
        store: Store = next(rendezvous("env://", timeout=_MEETING))[0]
        return store
    return _tcp(host, port, rank, world)


def _tcp(
    host: str, port: int, rank: int, world: int, server: socket.socket | None = None
) -> "Store":
    """A store that rank 0 keeps on the loopback interface."""
    from torch._C._distributed_c10d import TCPStore  # as for the file store of a team

    if rank:
        return TCPStore(host, port, world, is_master=False, timeout=_MEETING)
    server = server or socket.create_server((host, port))
    return TCPStore(
        host,
        port,
        world,
        is_master=True,
        timeout=_MEETING,
        wait_for_workers=False,
        master_listen_fd=server.detach(),
    )


def _loopback_store(store: "Store", rank: int, world: int, secret: bytes) -> tuple["Store", bytes]:
    """A store on this node alone, and the secret, which rank 0 tells to its own user."""
    if rank:
        port, told = _opened(store.get("cpbench/memory").decode(errors="replace"), rank)
        return _tcp(_HOST, port, rank, world), secret or told
    server = socket.create_server((_HOST, 0))
    port = server.getsockname()[1]
    secret = secret or secrets.token_hex().encode()
    own = _tcp(_HOST, port, rank, world, server)
    memory = os.memfd_create(_MEMORY)  # stays open, and goes with this process
    os.fchmod(memory, 0o600)
    os.write(memory, json_text([port, secret.decode()]).encode())
    store.set("cpbench/memory", f"/proc/{os.getpid()}/fd/{memory}")
    return own, secret


def _opened(place: str, rank: int) -> tuple[int, bytes]:
    """Read what rank 0 has in its memory, and nothing else that somebody may have named."""
    try:
        port, secret = parsed(_memory(Path(place)))
        return int(port), str(secret).encode()
    except (OSError, ValueError, TypeError) as error:
        raise MeasurementError(
            f"rank {rank} cannot read rank 0's secret at {place[:40]!r}: {error}; where ranks of a "
            f"node do not see one another's processes, set LOCAL_WORLD_SIZE to 1 and {_TOKEN} to "
            "the same text for all"
        ) from None


def _memory(place: Path) -> bytes:
    if not _WHERE.fullmatch(str(place)) or not str(place.readlink()).startswith(
        f"/memfd:{_MEMORY} "
    ):
        raise ValueError("it is no memory of a launch")
    with place.open("rb") as memory:
        if os.fstat(memory.fileno()).st_uid != os.getuid():
            raise ValueError("it is another user's")
        return memory.read(_MOST_SECRET)


def _left_in(store: "Store", rank: int) -> bytes:
    if rank == 0:
        store.set("cpbench/token", secrets.token_hex())
    return store.get("cpbench/token")
