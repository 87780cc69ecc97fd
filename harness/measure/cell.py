"""Time one cell in real processes, and judge its numbers there.

Each iteration starts at a barrier and counts as the slowest rank. Warm-ups come first; the samples
are kept, and the median is the headline with p20 and p80 beside it. Exposed communication comes
from one traced run of its own, never from the timed ones.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from harness.check.cell import ends_as, planned_traffic, start
from harness.execute.interpreter import TaskSpan, execute
from harness.execute.shards import collect
from harness.execute.transport import GroupTransport
from harness.measure.shared_plans import plans_of_rank_0, read_plans
from harness.memory.ledger import peaks
from harness.oracle.reference import inputs_of, reference_of, results_of
from harness.oracle.tolerance import Tolerance, judge
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.residency import Program
from harness.plan.tasks import Resident, Tensor
from harness.prepare.verified_plans import partial_results, roundings_sent
from harness.ranks.team import Member
from harness.records.config import Config, Where

_SEED = 0
_MATRICES = 4
"""Matrices of queries x keys that judging holds at once: weights, their gradients, temporaries."""
_WHOLE_TOKENS = 2048
"""Up to this many queries the oracle judges all heads; beyond, one KV head and its group."""


@dataclass(frozen=True, slots=True)
class RankSample:
    """Measurements of one rank.

    Attributes:
        samples_s: Seconds of each timed iteration.
        waited_s: Seconds that it waited for transfers, in the traced run.
        sent_bytes: Bytes that it sent, counted at the transport.
        results: Its outputs.
        spans: Its tasks in the traced run, by the machine's monotonic clock.
        plans: Of rank 0, the plans that all ran; see `shared_plans`.
    """

    samples_s: tuple[float, ...]
    waited_s: float
    sent_bytes: int
    results: Mapping[Resident, torch.Tensor]
    spans: tuple[TaskSpan, ...] = ()
    plans: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason why a rank did not run a cell: a refusal is not an error of the strategy."""

    reason: str


@dataclass(frozen=True, slots=True)
class Measurement:
    """A timed and judged cell.

    Attributes:
        samples_s: Per iteration, the slowest rank, seconds.
        exposed_comm_s: Longest wait for transfers of any rank in one traced run, seconds.
        bytes_sent_per_rank: Counted at the transport.
        peak_bytes: Largest peak of any rank, by the ledger.
        peak_bytes_algorithm: The same of what the algorithm needs, see `counting.ALGORITHM`.
        max_rel_error: Error of each result against the oracle.
        passed: Whether every error is within the tolerance.
        plan: The plan that ran.
    """

    samples_s: tuple[float, ...]
    exposed_comm_s: float
    bytes_sent_per_rank: tuple[int, ...]
    peak_bytes: int
    peak_bytes_algorithm: int
    max_rel_error: Mapping[str, float]
    passed: bool
    plan: Plan

    @property
    def time_s(self) -> float:
        """Median of the samples."""
        return statistics.median(self.samples_s)


def rank_job(member: Member, config: Config, warmup: int, iterations: int) -> RankSample | Refusal:
    """Run one cell on one rank (a job for a `Team`)."""
    on_gpu = config.transport is Where.NCCL
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    plans, text = plans_of_rank_0(member, config, device)
    if plans is None:
        return Refusal(text)
    problem = config.problem
    tensors = inputs_of(problem, _SEED, device)
    forward = plans.forward
    inputs = start(forward.plan, tensors, {}, (member.rank,))
    program = forward
    if config.direction is Direction.BACKWARD:
        saved = execute(forward, inputs, GroupTransport(batched=on_gpu)).results
        program = plans.backward
        inputs = start(program.plan, tensors, saved, (member.rank,))
    samples = []
    for iteration in range(warmup + iterations):
        transport = GroupTransport(batched=on_gpu)
        dist.barrier()
        _settle(device)
        begin = time.perf_counter()
        execute(program, inputs, transport)
        _settle(device)
        if iteration >= warmup:
            samples.append(time.perf_counter() - begin)
    transport = GroupTransport(batched=on_gpu)
    dist.barrier()
    traced = execute(program, inputs, transport, timed=True)
    waited = sum(span.end_s - span.start_s for span in traced.spans if span.stream == "wait")
    outputs = {
        resident: tensor.cpu()
        for resident, tensor in traced.results.items()
        if resident in program.plan.outputs
    }
    sent = transport.traffic.sent_bytes.get(member.rank, 0)
    return RankSample(
        tuple(samples),
        waited,
        sent,
        outputs,
        tuple(traced.spans),
        text if member.rank == 0 else "",
    )


def _settle(device: torch.device) -> None:
    """Wait for what was launched on a GPU; on a CPU a call is over when it returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def oracle_bytes(config: Config) -> int:
    """Memory that judging a cell takes: the float64 matrices of one head, and the mask."""
    return config.seqlen_q * config.seqlen_kv * (8 * _MATRICES + 1)


def joined_ranks(
    config: Config, ranks: Sequence[RankSample], *, judged: bool = True
) -> Measurement:
    """Join the measurements of the ranks, and judge the numbers.

    Args:
        config: The cell.
        ranks: The measurements of each rank.
        judged: Whether to ask the oracle; without it nothing is known of the errors.

    Raises:
        ValueError: The bytes that moved are not the plan's.
    """
    program = program_of_cell(config, ranks[0])
    sent, _ = planned_traffic(program.plan)
    moved = tuple(rank.sent_bytes for rank in ranks)
    expected = tuple(sent.get(rank, 0) for rank in range(config.cp))
    if moved != expected:
        raise ValueError(f"sent {moved} bytes by rank, the plan says {expected}")
    error, passed = _verdict(config, program, ranks) if judged else ({}, True)
    held, needed = peaks(program)
    return Measurement(
        samples_s=tuple(max(times) for times in zip(*(r.samples_s for r in ranks), strict=True)),
        exposed_comm_s=max(rank.waited_s for rank in ranks),
        bytes_sent_per_rank=moved,
        peak_bytes=held,
        peak_bytes_algorithm=needed,
        max_rel_error=error,
        passed=passed,
        plan=program.plan,
    )


def program_of_cell(config: Config, first: RankSample) -> Program:
    """Read the program that ran, from rank 0's report.

    Raises:
        ValueError, PlanError: It says nothing that is proved.
    """
    plans = read_plans(first.plans)
    return plans.forward if config.direction is Direction.FORWARD else plans.backward


def whole_heads(problem: Problem) -> int | None:
    """KV heads that a measured cell is judged on; None: all, as the oracle is quick enough."""
    return 1 if problem.hidden is None and problem.seqlen_q > _WHOLE_TOKENS else None


def judged_part(problem: Problem, tensor: Tensor, value: torch.Tensor) -> torch.Tensor:
    """The heads of a result that a measured cell is judged on."""
    kv = whole_heads(problem)
    if kv is None:
        return value
    return value[:, : kv if tensor.on_kv else kv * problem.group]


def reference_for(problem: Problem) -> Tolerance:
    """The oracle's answer on the heads that a measured cell is judged on."""
    return reference_of(replace(problem, cp=1), _SEED, whole_heads(problem))


def _verdict(
    config: Config, program: Program, ranks: Sequence[RankSample]
) -> tuple[dict[str, float], bool]:
    """Errors of the results, and whether all are within the tolerance."""
    results: dict[Resident, torch.Tensor] = {}
    for rank in ranks:
        results |= rank.results
    problem = config.problem
    reference = reference_for(problem)
    found = {}
    for name, tensor in results_of(problem, config.direction):
        if tensor is not Tensor.LSE:
            value = collect(program.plan, results, ends_as(program.plan, tensor))
            found[name] = judged_part(problem, tensor, value)
    merges, sent = partial_results(program) - 1, roundings_sent(program)
    own = judge(found, reference, merges=merges, sent=sent)
    return {each.name: each.error for each in own}, all(each.passed for each in own)
