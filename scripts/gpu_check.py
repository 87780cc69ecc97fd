"""Check and time the kernels of one CUDA card, in five minutes or less.

    .venv/bin/python scripts/gpu_check.py [--budget 300] [-o FILE]

Without a CUDA card it says so and exits with status 0. With one it

1. runs a covering of all pairs of the check grid, all ranks on the card, with each flash kernel
   that is there (torch flash, torch cuDNN, flash-attn 2 and 3), and float32 with plain matrix
   products ("math"), judged against the float64 oracle;
2. times attention kernels, forward and backward: full and causal squares of 256 to 64K tokens, and
   rectangles of 1:4 to 4:1, with 1 and 32 heads of 128, bfloat16;
3. times copies on the card and between it and the host;

and writes `results/gpu/<card name>.json`. What the budget has no time for is listed as left out.
The exit status is 1 if a check failed. The file holds one object; every time is in seconds and
every size in bytes:

    schema        1
    card          name, memory_bytes, multiprocessors, capability ("9.0"), driver_cuda
    environment   as in the records of a sweep
    recorded_at   UTC
    budget_s      what was allowed
    took_s        what it took
    capabilities  per kernel, "ok" or why it cannot be used
    checks        one per cell and kernel: the fields of `check`'s records, and kernel
    kernels       one per call: kernel, direction (forward, backward), causal, rows (queries),
                  columns (keys), heads (query and KV), head_dim, batch, dtype, status (ok, oom,
                  error), reason, and if ok: time_s (median), p20_s, p80_s, iterations, flops (from
                  the exact mask area, backward 2.5 x forward)
    copies        one per size and direction: source, target (device, host), size_bytes, and time_s,
                  p20_s, p80_s, iterations; a copy on the device reads and writes size_bytes
    left_out      names of what there was no time for

A time is that between two CUDA events around one call, of at least 20 calls after 5 that do not
count, issued one after another. A call shorter than its launch from the host takes as long as the
launch. Backward times include the row sum, as the call is given `out`.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from harness.base.environment import environment
from harness.base.json_fields import json_text
from harness.check.axes import Axes, pairwise
from harness.check.cell import JudgedCell, check
from harness.check.run import cost
from harness.errors import HarnessError
from harness.execute import kernels_cuda
from harness.plan.problem import Direction, Dtype
from harness.records.check_record import Outcome
from harness.records.config import Config

SCHEMA = 1
BUDGET_S = 300.0
MARGIN_S = 20.0  # for imports, the last call and the writing
CHECK_SHARE = 0.4  # of the budget; the checks stop there
WARMUP, ITERATIONS = 5, 20
HEAD_DIM = 128
HEADS = (1, 32)
LENGTHS = tuple(2**power for power in range(8, 17))  # 256 to 64K
RATIOS = ((1, 4), (1, 2), (2, 1), (4, 1))
RECTANGLES = (1024, 4096, 16384)  # the shorter side
COPIES = tuple(2**power for power in range(10, 31, 2))  # 1 KiB to 1 GiB
SEEDS = (0,)
MATH = "math"

AXES = Axes(
    cps=(1, 2, 4, 8),
    dtypes=(Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32),
    lengths=(5, 97, 1020),
    head_dims=(64, 128),
)

Sampler = Callable[[Callable[[], object]], list[float]]
"""Times a call: seconds of each of `ITERATIONS` calls, after the warm-up."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One attention call to time."""

    direction: Direction
    causal: bool
    rows: int
    columns: int
    heads: int

    @property
    def flops(self) -> int:
        """From the exact mask area; backward 2.5 x forward (arXiv:2307.08691, section 4.1)."""
        area = self.rows * (self.rows + 1) // 2 if self.causal else self.rows * self.columns
        return 2 * (2 if self.direction is Direction.FORWARD else 5) * area * self.heads * HEAD_DIM

    def as_json(self) -> dict[str, object]:
        """The call's fields in the results file."""
        return {
            **asdict(self),
            "direction": self.direction.value,
            "head_dim": HEAD_DIM,
            "batch": 1,
            "dtype": Dtype.BFLOAT16.value,
        }

    def __str__(self) -> str:
        """Name it in the list of omitted parts."""
        mask = "causal" if self.causal else "full"
        return f"{self.direction.value} {mask} {self.rows} x {self.columns}, {self.heads} heads"


def shapes() -> list[Shape]:
    """All calls to time, the cheapest first, so that what the budget cuts off is the fewest."""
    squares = [(n, n, causal) for n in LENGTHS for causal in (False, True)]
    rectangles = [(n * a, n * b, False) for n in RECTANGLES for a, b in RATIOS]
    found = [
        Shape(direction, causal, rows, columns, heads)
        for rows, columns, causal in (*squares, *rectangles)
        for heads in HEADS
        for direction in Direction
    ]
    return sorted(found, key=lambda shape: shape.flops)


def cells() -> list[Config]:
    """The check grid: one covering of all pairs, the cheapest first."""
    return sorted(pairwise(AXES, 1), key=cost)


def cuda_sampler(call: Callable[[], object]) -> list[float]:
    """Time calls with CUDA events."""
    for _ in range(WARMUP):
        call()
    events = []
    for _ in range(ITERATIONS):
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # begin, end
        pair[0].record()
        call()
        pair[1].record()
        events.append(pair)
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in events]


def timed(call: Callable[[], object], sampler: Sampler) -> dict[str, object]:
    """Median and band of a call."""
    samples = sampler(call)
    fifths = statistics.quantiles(samples, n=5, method="inclusive")
    return {
        "time_s": statistics.median(samples),
        "p20_s": fifths[0],
        "p80_s": fifths[-1],
        "iterations": len(samples),
    }


def attention(shape: Shape, device: torch.device) -> Callable[[], object]:
    """Make the tensors of a call, and the call."""
    generator = torch.Generator(device).manual_seed(0)

    def tensor(tokens: int) -> torch.Tensor:
        return torch.randn(
            (1, shape.heads, tokens, HEAD_DIM),
            generator=generator,
            device=device,
            dtype=torch.bfloat16,
        )

    q, k, v, dout = (tensor(n) for n in (shape.rows, shape.columns, shape.columns, shape.rows))
    flags = {"causal": shape.causal, "scale": HEAD_DIM**-0.5}
    if shape.direction is Direction.FORWARD:
        return lambda: kernels_cuda.forward(q, k, v, None, **flags)
    out, lse = kernels_cuda.forward(q, k, v, None, **flags)
    return lambda: kernels_cuda.backward((dout, q, k, v, out, lse), None, **flags)


def time_kernel(
    name: str, shape: Shape, device: torch.device, sampler: Sampler
) -> dict[str, object]:
    """Time one call of one kernel; what it cannot do becomes its status."""
    entry: dict[str, object] = {"kernel": name, **shape.as_json(), "status": "ok", "reason": ""}
    try:
        with kernels_cuda.only(name), torch.no_grad():
            return {**entry, **timed(attention(shape, device), sampler), "flops": shape.flops}
    except torch.OutOfMemoryError as error:
        return {**entry, "status": "oom", "reason": str(error).partition("\n")[0]}
    except (HarnessError, RuntimeError) as error:
        return {**entry, "status": "error", "reason": str(error).partition("\n")[0]}


def time_copies(device: torch.device, sampler: Sampler) -> Iterator[dict[str, object]]:
    """Time copies on the card, and to and from pinned host memory."""
    pin = device.type == "cuda"
    for size in COPIES:
        near = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        far = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
        for source, target, a, b in (
            ("device", "device", near[0], near[1]),
            ("host", "device", far, near[1]),
            ("device", "host", near[0], far),
        ):
            found = timed(lambda a=a, b=b: b.copy_(a, non_blocking=True), sampler)
            yield {"source": source, "target": target, "size_bytes": size, **found}


def judged(name: str, config: Config, device: torch.device) -> list[dict[str, object]]:
    """Check both directions of a cell with one kernel."""
    try:
        with nullcontext() if name == MATH else kernels_cuda.only(name):
            pair: Sequence[JudgedCell] = check(config, seeds=SEEDS, device=device)
    except (HarnessError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        pair = [JudgedCell(config, Outcome.FAILED, reason)]
    return [{"kernel": name, **cell.record().as_json()} for cell in pair]


class Examination:
    """A card, what was found of it, and the time that is left.

    Args:
        card: Facts of the card.
        device: Where it is.
        path: The results file, written after each part.
        budget_s: Seconds for all.
        sampler: Times a call.
        clock: Seconds.
    """

    def __init__(
        self,
        card: dict[str, object],
        device: torch.device,
        path: Path,
        budget_s: float = BUDGET_S,
        *,
        sampler: Sampler = cuda_sampler,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device, self._path, self._budget_s = device, path, budget_s
        self._sampler, self._clock = sampler, clock
        self._begin_s = clock()
        self._kernels = [
            name for name, status in kernels_cuda.capabilities().items() if status == "ok"
        ]
        self.body: dict[str, object] = {
            "schema": SCHEMA,
            "card": card,
            "environment": environment(),
            "recorded_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "budget_s": budget_s,
            "took_s": 0.0,
            "capabilities": kernels_cuda.capabilities(),
        }
        self.checks: list[dict[str, object]] = []
        self.kernels: list[dict[str, object]] = []
        self.copies: list[dict[str, object]] = []
        self.left_out: list[str] = []

    def run(self, configs: Sequence[Config], calls: Sequence[Shape]) -> bool:
        """Do all parts; return whether every check passed."""
        end_s = self._budget_s - MARGIN_S
        for config in configs:
            flash = config.dtype in (Dtype.BFLOAT16, Dtype.FLOAT16)
            for name in self._kernels if flash else (MATH,):
                if self._spent_s() > CHECK_SHARE * end_s:
                    self.left_out.append(f"check {name} {config.strategy} {config.hash}")
                else:
                    self.checks += judged(name, config, self._device)
        self._write()
        # The copies are short; the longest kernel calls are what a small budget goes without.
        self.copies += time_copies(self._device, self._sampler)
        self._write()
        for shape in calls:
            for name in self._kernels:
                if self._spent_s() > end_s:
                    self.left_out.append(f"time {name} {shape}")
                else:
                    self.kernels.append(time_kernel(name, shape, self._device, self._sampler))
        self._write()
        return all(entry["status"] != Outcome.FAILED for entry in self.checks)

    def _spent_s(self) -> float:
        return self._clock() - self._begin_s

    def _write(self) -> None:
        """Write the file whole or not at all."""
        self.body |= {
            "took_s": self._spent_s(),
            "checks": self.checks,
            "kernels": self.kernels,
            "copies": self.copies,
            "left_out": self.left_out,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        draft.write_text(json_text(self.body, indent=1) + "\n")
        draft.replace(self._path)


def facts(device: torch.device) -> dict[str, object]:
    """Describe a card."""
    card = torch.cuda.get_device_properties(device)
    return {
        "name": card.name,
        "memory_bytes": card.total_memory,
        "multiprocessors": card.multi_processor_count,
        "capability": f"{card.major}.{card.minor}",
        "driver_cuda": torch.version.cuda,
    }


def results_path(name: str) -> Path:
    """Where a card's results go: its name in small letters, other signs as one hyphen."""
    words = "".join(c if c.isalnum() else " " for c in name.lower()).split()
    return Path(__file__).resolve().parents[1] / "results" / "gpu" / f"{'-'.join(words)}.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Examine the first card."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds (default: 300)")
    parser.add_argument("-o", "--output", type=Path, help="results file")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("gpu_check: no CUDA card here, so there is nothing to check", file=sys.stderr)
        return 0
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    card = facts(device)
    path = args.output or results_path(str(card["name"]))
    examination = Examination(card, device, path, args.budget)
    passed = examination.run(cells(), shapes())
    failed = [entry for entry in examination.checks if entry["status"] == Outcome.FAILED]
    for entry in failed:
        print(
            f"failed: {entry['kernel']} {entry['strategy']} {entry['pattern']} cp={entry['cp']} "
            f"{entry['dtype']} {entry['direction']}: {entry['reason']}",
            file=sys.stderr,
        )
    print(
        f"{len(examination.checks)} checks, {len(failed)} failed; {len(examination.kernels)} "
        f"kernel times, {len(examination.copies)} copies, {len(examination.left_out)} left out",
        file=sys.stderr,
    )
    print(path)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
