"""Numerical equivalence to the oracle: one cell, judged.

A cell plans both directions, runs them on the local transport, and asks four things of the run:
every result is within the one tolerance of the float64 oracle; the bytes that moved are the plan's;
the memory that was held is the ledger's; and, where asked, real processes give the same bits.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from harness.base.numbers import finite
from harness.errors import PlanError, UnsupportedError, told
from harness.execute.allocator_account import Account
from harness.execute.interpreter import Run, execute
from harness.execute.shards import collect, initial_inputs
from harness.execute.transport import GroupTransport, LocalTransport, Traffic, Transport
from harness.memory.ledger import ledger
from harness.oracle.reference import inputs_of, reference_of, results_of
from harness.oracle.tolerance import Tolerance, Verdict, judge, widest
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Dtype
from harness.plan.residency import Program
from harness.plan.sizes import traffic
from harness.plan.tasks import FINISHED, Memory, Place, Resident, Tensor
from harness.prepare.verified_plans import Planned, partial_results, planned, roundings_sent
from harness.ranks.team import Member
from harness.records.check_record import CheckRecord, Outcome
from harness.records.config import Config, Where

SEEDS = (0, 1, 2)
"""Inputs that a lower-precision cell is judged on; float64 needs only the first."""


@dataclass(frozen=True, slots=True)
class JudgedCell:
    """One judged cell.

    Attributes:
        config: The cell that ran.
        status: How it ended.
        reason: Why, if it did not pass.
        max_rel_error: Largest error of each tensor over the seeds, by the rule in `tolerance`.
        tolerances: The most that each may be.
        digest: SHA-256 of all results of the first seed.
    """

    config: Config
    status: Outcome
    reason: str = ""
    max_rel_error: Mapping[str, float] = field(default_factory=dict)
    tolerances: Mapping[str, float] = field(default_factory=dict)
    digest: str = ""

    def record(self) -> CheckRecord:
        """Return its record."""
        return CheckRecord(
            config_hash=self.config.hash,
            config=self.config,
            status=self.status,
            reason=self.reason,
            max_rel_error=finite(self.max_rel_error),
            tolerances=self.tolerances,
        )


@dataclass(slots=True)
class Both:
    """Outcome of running both directions.

    Attributes:
        results: Global tensors by name.
        runs: The raw runs, by direction.
        traffic: Bytes by direction.
        peaks: Accounted peak bytes per rank, first of devices, then of hosts, by direction; empty
            without an account.
    """

    results: dict[str, torch.Tensor]
    runs: dict[Direction, Run]
    traffic: dict[Direction, Traffic]
    peaks: dict[Direction, list[int]]


def run_both(
    plans: Planned,
    tensors: Mapping[Tensor, torch.Tensor],
    make_transport: Callable[[], Transport],
    *,
    account: bool = False,
) -> Both:
    """Run forward, then backward from what it saved.

    Args:
        plans: Proved plans.
        tensors: Global q, k, v and dout.
        make_transport: Called once per direction.
        account: Follow the allocator (slower).

    Returns:
        Global results where all ranks are in this process; else `results` is empty.
    """
    both = Both({}, {}, {}, {})
    saved: Mapping[Resident, torch.Tensor] = {}
    for direction, program in (
        (Direction.FORWARD, plans.forward),
        (Direction.BACKWARD, plans.backward),
    ):
        transport = make_transport()
        inputs = start(program.plan, tensors, saved, transport.ranks)
        run, peaks = _run(program, inputs, transport, account=account)
        both.runs[direction], both.traffic[direction] = run, transport.traffic
        if account:
            both.peaks[direction] = peaks
        saved = run.results
        if len(transport.ranks) == program.plan.problem.cp:
            both.results |= _results(program.plan, run)
    return both


def start(
    plan: Plan,
    tensors: Mapping[Tensor, torch.Tensor],
    saved: Mapping[Resident, torch.Tensor],
    ranks: Iterable[int],
) -> dict[Resident, torch.Tensor]:
    """Inputs of a plan: what the forward plan saved, the rest cut from global tensors."""
    kept = {resident: saved[resident] for resident in plan.initial if resident in saved}
    missing = tuple(resident for resident in plan.initial if resident not in kept)
    return kept | initial_inputs(replace(plan, initial=missing), tensors, ranks)


def _run(
    program: Program,
    inputs: Mapping[Resident, torch.Tensor],
    transport: Transport,
    *,
    account: bool,
) -> tuple[Run, list[int]]:
    if not account:
        return execute(program, inputs, transport), []
    by_place: dict[Place, list[torch.Tensor]] = {}
    for resident, tensor in inputs.items():
        by_place.setdefault(resident.place, []).append(tensor)
    with Account(program.plan.problem.cp, by_place) as watch:
        run = execute(program, inputs, transport, watch=watch)
    return run, [peak for memory in Memory for peak in watch.peaks(memory)]


def _results(plan: Plan, run: Run) -> dict[str, torch.Tensor]:
    outputs = {resident: run.results[resident] for resident in plan.outputs}
    named = {}
    for name, tensor in results_of(plan.problem, plan.direction):
        # The log-sum-exp is saved where it was computed; it is no output of its own.
        source = run.results if tensor is Tensor.LSE else outputs
        named[name] = collect(plan, source, ends_as(plan, tensor))
    return named


def ends_as(plan: Plan, tensor: Tensor) -> Tensor:
    """Tensor in which a result ends: partial sums of a weight's gradient, or their total."""
    whole = FINISHED.get(tensor, tensor)
    return whole if any(piece.tensor is whole for _, piece in plan.outputs) else tensor


def planned_traffic(plan: Plan) -> tuple[dict[int, int], dict[int, int]]:
    """Bytes that each rank sends and receives, by the plan; ranks that do neither are left out."""
    sent, received = (
        {rank: size for rank, size in enumerate(side) if size} for side in traffic(plan)
    )
    return sent, received


def check(
    config: Config, *, seeds: tuple[int, ...] = SEEDS, device: torch.device | None = None
) -> tuple[JudgedCell, JudgedCell]:
    """Judge the forward and the backward of one configuration on the local transport.

    Args:
        config: The cell; its direction is not looked at.
        seeds: Inputs for lower precisions.
        device: Where all ranks run; None is the CPU, where memory is held against the ledger too.

    Returns:
        The forward cell and the backward cell.
    """
    cells = [replace(config, direction=direction) for direction in Direction]
    try:
        problem = config.problem
        plans = planned(problem, config.strategy)
    except UnsupportedError as error:
        return pair_of(JudgedCell(cell, Outcome.REFUSED, str(error)) for cell in cells)
    except PlanError as error:
        reason = told(error)
        return pair_of(JudgedCell(cell, Outcome.FAILED, reason) for cell in cells)
    judged = seeds[:1] if problem.dtype is Dtype.FLOAT64 else seeds
    verdicts: list[Verdict] = []
    found: dict[Direction, list[str]] = {direction: [] for direction in Direction}
    digests: dict[Direction, str] = {}
    for number, seed in enumerate(judged):
        tensors = inputs_of(problem, seed, device)
        account = number == 0 and device is None
        both = run_both(plans, tensors, lambda: LocalTransport(problem.cp), account=account)
        results = {name: tensor.cpu() for name, tensor in both.results.items()}
        tolerance = reference_of(replace(problem, cp=1), seed)
        for _, program in _programs(plans):
            verdicts += _verdicts(program, results, tolerance)
        if number == 0:
            for direction, program in _programs(plans):
                found[direction] += _compare(program, both, direction, range(problem.cp))
                digests[direction] = combine(rank_digests(both.runs[direction]))
    joined = widest(verdicts)
    return pair_of(_judge(cell, joined, found, digests) for cell in cells)


def pair_of(cells: Iterable[JudgedCell]) -> tuple[JudgedCell, JudgedCell]:
    """Take the cells of the two directions."""
    forward, backward = cells
    return forward, backward


def _programs(plans: Planned) -> tuple[tuple[Direction, Program], ...]:
    return (Direction.FORWARD, plans.forward), (Direction.BACKWARD, plans.backward)


def _verdicts(
    program: Program, results: Mapping[str, torch.Tensor], tolerance: Tolerance
) -> tuple[Verdict, ...]:
    plan = program.plan
    own = {name: results[name] for name, _ in results_of(plan.problem, plan.direction)}
    merges, sent = partial_results(program) - 1, roundings_sent(program)
    return judge(own, tolerance, merges=merges, sent=sent)


def _compare(program: Program, both: Both, direction: Direction, ranks: Sequence[int]) -> list[str]:
    """Hold bytes moved and memory held against the plan, on ranks of this process."""
    wrong = []
    traffic = both.traffic[direction]
    for verb, moved, planned_bytes in zip(
        ("sent", "received"),
        (traffic.sent_bytes, traffic.received_bytes),
        planned_traffic(program.plan),
        strict=True,
    ):
        expected = {rank: size for rank, size in planned_bytes.items() if rank in ranks}
        if moved != expected:
            wrong.append(f"{verb} {moved} bytes by rank, the plan says {expected}")
    if direction in both.peaks:
        found, cp, book = both.peaks[direction], program.plan.problem.cp, ledger(program)
        for memory, at, peaks in (
            (Memory.DEVICE, 0, book.peak_bytes),
            (Memory.HOST, cp, book.host_peak_bytes),
        ):
            held = {rank: found[at + rank] for rank in ranks}
            expected = {rank: peaks[rank] for rank in ranks}
            if held != expected:
                text = f"held {held} bytes of {memory.value} by rank, the ledger says {expected}"
                wrong.append(text)
    return wrong


def _judge(
    config: Config,
    verdicts: Mapping[str, Verdict],
    found: Mapping[Direction, list[str]],
    digests: Mapping[Direction, str],
) -> JudgedCell:
    problem = config.problem
    own = [name for name, _ in results_of(problem, config.direction)]
    names = own
    if config.direction is Direction.BACKWARD:
        names = [name for name, _ in results_of(problem, Direction.FORWARD)] + own
    wrong = [
        f"{name} is off by {verdicts[name].error:.2e}, at most {verdicts[name].limit:.2e} is right"
        for name in own
        if not verdicts[name].passed
    ]
    wrong += found[config.direction]
    return JudgedCell(
        config,
        Outcome.FAILED if wrong else Outcome.PASSED,
        "; ".join(wrong),
        {name: verdicts[name].error for name in names},
        {name: verdicts[name].limit for name in names},
        digests[config.direction],
    )


def rank_digests(run: Run) -> dict[int, str]:
    """Hash each rank's results, bit for bit."""
    hashes: dict[int, hashlib._Hash] = {}
    for resident in sorted(run.results, key=str):
        tensor = run.results[resident].cpu().flatten().clone()
        state = hashes.setdefault(resident.place.rank, hashlib.sha256())
        state.update(str(resident).encode())
        state.update(tensor.view(torch.uint8).numpy().tobytes())
    return {rank: state.hexdigest() for rank, state in hashes.items()}


def combine(digests: Mapping[int, str]) -> str:
    """Join the hashes of all ranks into one."""
    joined = ",".join(f"{rank}:{digests[rank]}" for rank in sorted(digests))
    return hashlib.sha256(joined.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class RankRun:
    """Outcome of one direction on one rank of a team.

    Attributes:
        digest: Hash of its results, by rank.
        wrong: How bytes moved or memory held differ from the plan.
    """

    digest: Mapping[int, str]
    wrong: tuple[str, ...]


def group_run(
    member: Member, config: Config, seed: int, *, account: bool
) -> dict[Direction, RankRun]:
    """Run one configuration in a team and judge this rank's part (a job for a `Team`)."""
    plans = planned(config.problem, config.strategy)
    tensors = inputs_of(config.problem, seed)
    both = run_both(plans, tensors, GroupTransport, account=account)
    return {
        direction: RankRun(
            rank_digests(both.runs[direction]),
            tuple(_compare(program, both, direction, ranks=(member.rank,))),
        )
        for direction, program in _programs(plans)
    }


def as_group(cell: JudgedCell, ranks: Sequence[RankRun] = ()) -> JudgedCell:
    """Judge a team's results against the local run's: the same bits, or failed.

    Args:
        cell: The record of the local run; a refused cell stays so.
        ranks: The outcome of each rank.
    """
    config = replace(cell.config, transport=Where.GLOO)
    digests = {rank: digest for each in ranks for rank, digest in each.digest.items()}
    wrong = [f"rank {rank}: {text}" for rank, each in enumerate(ranks) for text in each.wrong]
    if cell.status is Outcome.PASSED and combine(digests) != cell.digest:
        wrong.append("gloo processes and the local transport give different bits")
    if cell.status is Outcome.PASSED and wrong:
        return replace(cell, config=config, status=Outcome.FAILED, reason="; ".join(wrong))
    return replace(cell, config=config)
