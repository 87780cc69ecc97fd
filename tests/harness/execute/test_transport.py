"""Messages in batches without tags, as NCCL needs them, over gloo: the same bits as one by one."""

import pytest
import torch.distributed as dist

from harness.check.cell import combine, rank_digests, run_both
from harness.execute.transport import GroupTransport, LocalTransport
from harness.oracle.inputs import make_inputs
from harness.plan.problem import Direction
from harness.prepare.verified_plans import planned
from harness.records.config import Config, Where
from tests import support

CP = 4
STRATEGIES = ("ring", "zigzag", "stripe", "ulysses", "usp:2x2", "allgather", "double_ring:inner=2")


def config(strategy: str) -> Config:
    return Config(
        strategy=strategy,
        pattern="causal",
        cp=CP,
        seqlen_q=61,
        seqlen_kv=61,
        heads_q=4,
        heads_kv=2,
        head_dim=8,
        transport=Where.GLOO,
    )


def batched(strategy: str) -> tuple[dict[Direction, dict[int, str]], int]:
    """Run both directions on this rank; its digests, and the most messages of one batch."""
    cell = config(strategy)
    largest = [0]
    issue = dist.batch_isend_irecv

    def counted(operations: list[dist.P2POp]) -> list[dist.Work]:
        assert all(operation.tag == 0 for operation in operations)
        largest[0] = max(largest[0], len(operations))
        return issue(operations)

    dist.batch_isend_irecv = counted
    try:
        both = run_both(
            planned(cell.problem, strategy),
            make_inputs(cell.problem, 0),
            lambda: GroupTransport(batched=True),
        )
    finally:
        dist.batch_isend_irecv = issue
    found = {direction: rank_digests(run) for direction, run in both.runs.items()}
    return found, largest[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batches_without_tags_give_the_bits_of_the_local_transport(strategy: str) -> None:
    cell = config(strategy)
    here = run_both(
        planned(cell.problem, strategy),
        make_inputs(cell.problem, 0),
        lambda: LocalTransport(CP),
    )
    answers = support.ranks(CP).run(batched, strategy)

    for direction, run in here.runs.items():
        digests: dict[int, str] = {}
        for found, _ in answers:
            digests |= found[direction]
        assert combine(digests) == combine(rank_digests(run)), direction
    # Keys and values of one hop go together, or more.
    assert max(largest for _, largest in answers) >= 2
