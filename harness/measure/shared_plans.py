"""One plan for all ranks of a cell: rank 0 makes it, and sends it to the others.

A planner that searches under a time limit may find another plan each time, and nothing promises
that ranks share a folder in which plans are kept. What arrives is proved on every rank.
"""

from functools import lru_cache

import torch
import torch.distributed as dist

from harness.base.json_fields import json_text, parsed
from harness.errors import MeasurementError, UnsupportedError, told
from harness.plan.plan import to_json
from harness.plan.reader import from_json
from harness.prepare.verified_plans import Planned, planned_for
from harness.ranks.team import Member
from harness.records.config import Config
from harness.verify.proof import verify


def plans_of_rank_0(
    member: Member, config: Config, device: torch.device
) -> tuple[Planned | None, str]:
    """Agree on the plans of a cell; all ranks of the group call this together.

    Args:
        member: This rank.
        config: The cell.
        device: Where the group's tensors live.

    Returns:
        The proved plans, and what `read_plans` reads; None and the reason where rank 0 finds that
        the strategy cannot do it.

    Raises:
        MeasurementError: Rank 0 failed; it raises its own error.
    """
    try:
        own, body = _made(member, config)
    except Exception as error:
        _broadcast(member, json_text({"failed": told(error)}), device)
        raise
    text = _broadcast(member, body, device)
    answer = parsed(text)
    if "failed" in answer:
        raise MeasurementError(f"rank 0 could not plan: {answer['failed']}")
    if "refused" in answer:
        return None, str(answer["refused"])
    return own or read_plans(text), text


def _made(member: Member, config: Config) -> tuple[Planned | None, str]:
    """Rank 0's plans, and what it sends."""
    if member.rank != 0:
        return None, ""
    try:
        plans = planned_for(config)
    except (UnsupportedError, ValueError) as error:
        return None, json_text({"refused": str(error)})
    both = (plans.forward, plans.backward)
    return plans, json_text({"plans": [to_json(program.plan) for program in both]})


@lru_cache(maxsize=2)  # forward and backward cells have the same plans
def read_plans(text: str) -> Planned:
    """Read and prove what rank 0 sent.

    Raises:
        ValueError: The answer is not a pair of plans.
        PlanError: One is wrong.
    """
    forward, backward = parsed(text)["plans"]
    return Planned(verify(from_json(forward)), verify(from_json(backward)))


def _broadcast(member: Member, text: str, device: torch.device) -> str:
    """Rank 0's text, on every rank."""
    data = text.encode()
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, 0)
    content = torch.empty(int(size), dtype=torch.uint8, device=device)
    if member.rank == 0:
        content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(content, 0)
    return bytes(content.cpu().numpy()).decode()
