"""Mutate every kind of file that a user may bring, and see that each is used rightly or refused.

Clusters, suites, block tables, models and files of the cache are mutated: numbers become zero,
NaN, huge or words, lines go or come twice, bytes turn into others, brackets nest without end. The
command line reads each. It must end within the limit with status 0, 1 or 2, and what it prints must
be printable text, or JSON of finite numbers where JSON was asked for. A damaged file of the cache
must change no result.

    python scripts/hunt_files.py --cases 2000 --seed 7
"""

import argparse
import io
import os
import random
import re
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from harness import cli
from harness.base.json_fields import parsed
from harness.cluster.calibration import FOLDER
from harness.sweep import suite
from harness.terminal.arguments import count

LIMIT_S = 20.0
MOST_TEXT = 200_000
NUMBERS = (
    *("0", "-1", "1", "nan", "inf", "-inf", "1e308", "-1e308", "1e-308", "5e-324", "1e30", "1e-30"),
    *("9" * 400, "9223372036854775807", "0.5", "true", '"x"', "[]", "{}", "null", "1e6", "1000003"),
)
ODD = (
    *("\x00", "\x1b[2J", "\x9b2J", "\u202e", "\ufeff", "é", "\\", "\n"),
    *("=", '"', "[", "]", "{", "#"),
)
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.])")
SHAPE = ("--cp", "2", "--seqlen", "1k", "--heads-q", "6", "--heads-kv", "2", "--head-dim", "64")


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        seeds: Whole ones.
        suffix: Of its name.
        words: The command line that reads the file of a name.
    """

    seeds: tuple[str, ...]
    suffix: str
    words: Callable[[str], tuple[str, ...]]


def kinds() -> dict[str, Kind]:
    """Files to mutate, by name."""
    clusters = tuple(
        (FOLDER / f"{name}.toml").read_text() for name in ("h100-hamming", "local-cpu")
    )
    suites = tuple(suite._text(name) for name in suite.names())
    tables = ("200\n120\n112\n", "1 1 0\n0 2 1\n2 0 1\n")
    rows = ("[[2,0,0],[1,2,0],[1,1,2]]", "[[1, 1], [2, 1]]")
    model = ("layers=2,hidden=64,heads=6/2,head_dim=8,ffn=96,vocab=1000,rotary=5e5",)
    machine = ("simulate", "--strategy", "zigzag", "--json", *SHAPE)
    layer = (*machine, "--scope", "layer", "--hidden", "384")
    cells = ("sweep", "--dry-run")
    return {
        "cluster": Kind(clusters, ".toml", lambda name: (*machine, "--cluster", name)),
        "layer": Kind(clusters, ".toml", lambda name: (*layer, "--cluster", name)),
        "suite": Kind(suites, ".toml", lambda name: (*cells, "--suite", name)),
        "table": Kind(tables, ".txt", lambda name: (*machine, "--pattern", f"table:file={name}")),
        "rows": Kind(rows, ".json", lambda name: (*machine, "--pattern", f"table:file={name}")),
        "model": Kind(model, "", lambda text: (*cells, "--mode", "simulate", "--model", text)),
    }


def mutated(text: str, draw: random.Random) -> bytes:
    """A text with one to three changes."""
    data = text
    for _ in range(draw.randint(1, 3)):
        lines = data.splitlines(keepends=True) or [""]
        at = draw.randrange(len(lines))
        match draw.randrange(8):
            case 0 | 1 | 2 if found := list(NUMBER.finditer(data)):
                one = draw.choice(found)
                data = data[: one.start()] + draw.choice(NUMBERS) + data[one.end() :]
            case 3:
                del lines[at]
                data = "".join(lines)
            case 4:
                lines.insert(at, draw.choice(lines))
                data = "".join(lines)
            case 5:
                place = draw.randrange(len(data) + 1)
                data = data[:place] + draw.choice(ODD) + data[place + draw.randrange(2) :]
            case 6:
                data = data[: draw.randrange(len(data) + 1)]
            case _:
                place = draw.randrange(len(data) + 1)
                data = data[:place] + draw.choice("[{(") * draw.choice((3, 2000)) + data[place:]
    raw = data.encode()
    if draw.randrange(12) == 0 and raw:
        place = draw.randrange(len(raw))
        raw = raw[:place] + bytes([draw.randrange(256)]) + raw[place + 1 :]
    return raw


class LateError(Exception):
    """The limit has passed."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `LateError` here after some seconds."""

    def late(*_: object) -> NoReturn:
        raise LateError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def ran(words: tuple[str, ...], limit_s: float) -> tuple[int | None, str, str, str]:
    """Run a command line here: its status, stdout, stderr, and what was wrong with its end."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with limited(limit_s), redirect_stdout(out), redirect_stderr(err):
            status = cli.main(words)
    except SystemExit as end:  # of argparse
        status = end.code if isinstance(end.code, int) else 1
    except BaseException as error:  # a crash is what is looked for
        if isinstance(error, KeyboardInterrupt):
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return None, "", "", f"{type(error).__name__} at {where}: {str(error)[:100]!r}"
    return status, out.getvalue(), err.getvalue(), ""


def fault_of(words: tuple[str, ...], limit_s: float) -> tuple[str, str]:
    """How a command line ended, and what is wrong with that; empty if nothing is."""
    status, out, err, wrong = ran(words, limit_s)
    if wrong:
        return "fault", wrong
    if status not in (0, 1, 2):
        return "fault", f"status {status}"
    for name, text in (("stdout", out), ("stderr", err)):
        if not text.replace("\n", "").replace("\t", "").isprintable():
            return "fault", f"{name} is not printable: {text[:80]!r}"
        if len(text) > MOST_TEXT and name == "stderr":
            return "fault", f"{name} has {len(text)} characters"
    if status != 0 and not err.strip() and not out.strip():
        return "fault", f"status {status} without a word"
    if status == 0 and "--json" in words:
        try:
            parsed(out)
        except ValueError:
            return "fault", f"stdout is no JSON of finite numbers: {out[:80]!r}"
    return ("used" if status == 0 else "refused"), ""


Found = tuple[Counter[str], list[str]]
"""How often each end was seen, and the faults."""


def hunt(name: str, kind: Kind, cases: int, seed: int, folder: Path) -> Found:
    """Try mutated files of one kind; how they ended, and the faults."""
    draw = random.Random(f"{seed} {name}")
    ends: Counter[str] = Counter()
    faults = []
    for number in range(cases):
        content = mutated(draw.choice(kind.seeds), draw)
        if kind.suffix:
            path = folder / f"case{kind.suffix}"
            path.write_bytes(content)
            words = kind.words(str(path))
        else:
            words = kind.words(content.decode(errors="replace").replace("\x00", ""))
        end, fault = fault_of(words, LIMIT_S)
        ends[end] += 1
        if fault:
            kept = folder / f"fault-{name.replace(' ', '-')}-{number}{kind.suffix}"
            kept.write_bytes(content)
            faults.append(f"{name} {number}: {fault} ({kept})")
    return ends, faults


def hunt_cache(cases: int, seed: int, folder: Path) -> Found:
    """Damage files of the cache: results must be what they are without it."""
    draw = random.Random(f"{seed} cache")
    shape = ("--cp", "3", "--seqlen", "96", "--heads-q", "6", "--heads-kv", "2", "--head-dim", "16")
    words = ("plan", "--strategy", "ultraattn:seconds=0.2", "--pattern", "star", "--json", *shape)
    _, expected, _, wrong = ran(words, LIMIT_S)
    files = [path for path in folder.rglob("*") if path.is_file()]
    ends: Counter[str] = Counter()
    faults = [] if files and not wrong else [f"cache: nothing is kept {wrong}"]
    for number in range(cases if files else 0):
        path = draw.choice(files)
        whole = path.read_bytes()
        place = draw.randrange(len(whole))
        rest = whole[place + draw.randrange(3) :]
        path.write_bytes(whole[:place] + bytes([draw.randrange(256)]) + rest)
        status, out, _, wrong = ran(words, LIMIT_S)
        end = "used" if (status, out, wrong) == (0, expected, "") else "fault"
        ends[end] += 1
        if end == "fault":
            faults.append(f"cache {number}: status {status}, another result, or {wrong}")
        path.write_bytes(whole)
    return ends, faults


def main() -> int:
    """Print a line per kind, then each fault; 1 if there is one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=count, default=300, help="of each kind (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the mutations (%(default)s)")
    parser.add_argument("--kinds", default="", help="some kinds only, comma-separated")
    parser.add_argument("--keep", type=Path, help="folder for files that make a fault")
    args = parser.parse_args()
    wanted = [name for name in args.kinds.split(",") if name]
    faults: list[str] = []
    with tempfile.TemporaryDirectory(prefix="hunt-") as folder:
        os.environ["CPBENCH_CACHE"] = f"{folder}/cache"
        place = args.keep or Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        for name, kind in kinds().items():
            if not wanted or name in wanted:
                faults += told(name, hunt(name, kind, args.cases, args.seed, place))
        if not wanted or "cache" in wanted:
            faults += told("cache", hunt_cache(args.cases, args.seed, Path(folder) / "cache"))
    for fault in faults:
        print(fault)
    return 1 if faults else 0


def told(name: str, found: Found) -> list[str]:
    """Print the counts of one kind; return its faults."""
    ends, faults = found
    counts = ", ".join(f"{ends[end]} {end}" for end in ("used", "refused", "fault"))
    print(f"{name}: {ends.total()} cases, {counts}", flush=True)
    return faults


if __name__ == "__main__":
    sys.exit(main())
