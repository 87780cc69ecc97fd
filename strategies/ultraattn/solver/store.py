"""A folder of solved assignments, one JSON file each, named by a hash of the problem.

A file is written under another name and then renamed, so a reader sees all of it or nothing,
however many processes share the folder and whenever one is stopped. A file that cannot be read or
was edited is a miss.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from harness.base.cache import read_kept, write_kept
from harness.base.json_fields import json_text
from harness.schedule.scip import SolverStatus
from strategies.ultraattn.solver.assign import DEFAULT_S, Assigned, assign
from strategies.ultraattn.solver.instance import Instance, account, all_received, most

_FORMAT = 1  # part of the hash: a file of another format is never found


def instance_key(instance: Instance) -> str:
    """Return the hash of everything that decides an assignment."""
    text = json_text({"format": _FORMAT, **asdict(instance)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class Cache:
    """Solved assignments in a folder.

    Args:
        folder: Made when first written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, instance: Instance) -> Path:
        """Return where an instance is kept."""
        return self.folder / f"{instance_key(instance)}.json"

    def get(self, instance: Instance) -> Assigned | None:
        """Return the stored answer for an instance; None without one that can be read and fits."""
        return read_kept(self.path(instance), partial(_read, instance))

    def put(self, instance: Instance, found: Assigned) -> None:
        """Keep an assignment, unless a better one of the same instance is kept."""
        kept = self.get(instance)
        if kept is not None and _merit(kept) <= _merit(found):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        write_kept(self.path(instance), json_text(asdict(found)).encode())


def _read(instance: Instance, content: bytes) -> Assigned | None:
    """Read an assignment and account for it anew; None if an older account gave another value."""
    fields = json.loads(content)
    cells = tuple(tuple(row) for row in fields["cells"])
    lines = account(instance, cells)
    found = Assigned(
        cells=cells,
        value=most(lines),
        bound=int(fields["bound"]),
        volume=all_received(lines),
        status=SolverStatus(fields["status"]),
        seconds=float(fields["seconds"]),
        source=str(fields["source"]),
    )
    fits = all(line.work <= instance.cap for line in lines)
    return found if fits and found.value == fields["value"] else None


def _merit(found: Assigned) -> tuple[int, int, int, float]:
    return found.value, -found.bound, found.volume, -found.seconds


def assign_cached(
    instance: Instance,
    cache: Cache | None,
    *,
    seconds: float = DEFAULT_S,
    prove: bool = False,
    seed: int = 0,
) -> Assigned:
    """Return the stored answer if it is proved or took at least as long; else solve and store."""
    if cache is None:
        return assign(instance, seconds=seconds, prove=prove, seed=seed)
    kept = cache.get(instance)
    if kept is None:
        found = assign(instance, seconds=seconds, prove=prove, seed=seed)
    elif kept.status is SolverStatus.OPTIMAL or (not prove and kept.seconds >= seconds):
        return kept
    else:
        again = assign(instance, seconds=seconds, prove=prove, seed=seed, given=(kept.cells,))
        bound = max(again.bound, kept.bound)
        proved = bound == again.value
        found = replace(again, bound=bound, status=SolverStatus.OPTIMAL if proved else again.status)
    with suppress(OSError):  # a full disk, a folder that takes no files: it is only not kept
        cache.put(instance, found)
    return found
