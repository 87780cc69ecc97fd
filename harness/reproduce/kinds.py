"""How a claim's own figure is computed: a table of kinds, and what each needs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from harness.reproduce import blockwise, counted, figures, solved, speedups, sums, timed
from harness.reproduce.claims import Claim, JudgedClaim, Ours, claims_in, published_file

ClaimSetting = Mapping[str, Any]


class Provenance(StrEnum):
    """How a figure of ours is known."""

    FORMULA = "formula"
    COUNTED = "counted in a plan"
    SOLVED = "solved"
    SIMULATED = "simulated"
    MEASURED = "measured in small"


@dataclass(frozen=True, slots=True)
class ClaimKind:
    """A way to compute a figure.

    Attributes:
        work: From a setting to the figure.
        provenance: How it is known.
        quick: Whether figures of this kind take milliseconds, once a plan is there.
    """

    work: Callable[[ClaimSetting], float | Ours]
    provenance: Provenance
    quick: bool = True


_FORMULA, _COUNTED, _SOLVED, _SIMULATED = (
    Provenance.FORMULA,
    Provenance.COUNTED,
    Provenance.SOLVED,
    Provenance.SIMULATED,
)
KINDS: Mapping[str, ClaimKind] = {
    "sum": ClaimKind(sums.computed_sum, _FORMULA),
    "new_tokens_with_equal_bytes": ClaimKind(counted.new_tokens_with_equal_bytes, _FORMULA),
    "block_length": ClaimKind(counted.block_length, _FORMULA),
    "received": ClaimKind(counted.volume_received, _COUNTED),
    "received_units": ClaimKind(counted.received_units, _COUNTED),
    "received_over": ClaimKind(counted.received_over, _COUNTED),
    "less_received": ClaimKind(counted.less_received, _COUNTED),
    "less_received_large": ClaimKind(counted.less_received, _COUNTED, quick=False),
    "less_received_both": ClaimKind(counted.less_received_both, _COUNTED),
    "imbalance": ClaimKind(counted.imbalance_in, _COUNTED),
    "lockstep": ClaimKind(counted.lockstep_in, _COUNTED),
    "work": ClaimKind(counted.work_in, _COUNTED),
    "mean_work": ClaimKind(counted.mean_work, _COUNTED),
    "example_output": ClaimKind(blockwise.example_output, _COUNTED),
    "example_difference": ClaimKind(blockwise.example_difference, _COUNTED),
    "tiles": ClaimKind(counted.tiles_in, _COUNTED),
    "tokens": ClaimKind(counted.tokens_in, _COUNTED),
    "heads_attended": ClaimKind(counted.heads_in, _COUNTED),
    "key_transfers": ClaimKind(counted.key_transfers, _COUNTED),
    "idle_transfers": ClaimKind(counted.idle_transfers, _COUNTED),
    "all_to_alls": ClaimKind(counted.all_to_alls_in, _COUNTED),
    "links_used": ClaimKind(counted.links_used, _COUNTED),
    "idle_nics": ClaimKind(counted.idle_nics, _COUNTED),
    "busiest_link_over": ClaimKind(counted.busiest_link_over, _COUNTED),
    "blocks_of_work": ClaimKind(solved.blocks_of_work, _COUNTED),
    "cap_of_work": ClaimKind(solved.cap_of_work, _COUNTED),
    "unevenness": ClaimKind(solved.unevenness, _COUNTED),
    "account_entry": ClaimKind(solved.account_entry, _COUNTED),
    "most_traffic": ClaimKind(solved.most_traffic, _COUNTED),
    "ways": ClaimKind(solved.ways, _COUNTED),
    "least_traffic": ClaimKind(solved.least_traffic, _SOLVED),
    "ways_to_least": ClaimKind(solved.ways_to_least, _SOLVED),
    "example_schedule": ClaimKind(solved.example_schedule, _COUNTED),
    "mean_speedup": ClaimKind(speedups.mean_speedup, _FORMULA),
    "speedup": ClaimKind(speedups.speedup, _SIMULATED, quick=False),
    "least_units": ClaimKind(solved.least_units, _SOLVED, quick=False),
    "milliseconds": ClaimKind(timed.layer_milliseconds, _SIMULATED, quick=False),
    "rate": ClaimKind(timed.rate, _SIMULATED, quick=False),
    "per_second": ClaimKind(timed.per_second, _SIMULATED, quick=False),
    "share_of_one_gpu": ClaimKind(timed.share_of_one_gpu, _SIMULATED, quick=False),
    "times_faster": ClaimKind(timed.times_faster, _SIMULATED, quick=False),
    "over_other": ClaimKind(timed.over_other, _SIMULATED, quick=False),
    "is_faster": ClaimKind(timed.is_faster, _SIMULATED, quick=False),
    "equal_share": ClaimKind(timed.equal_share, _SIMULATED, quick=False),
    "step_part": ClaimKind(timed.step_part, _SIMULATED, quick=False),
    "throughput": ClaimKind(figures.throughput, _SIMULATED, quick=False),
    "throughput_over": ClaimKind(figures.throughput_over, _SIMULATED, quick=False),
    "peak": ClaimKind(figures.peak_gib, _COUNTED, quick=False),
    "attention_memory": ClaimKind(figures.attention_gib, _COUNTED, quick=False),
    "longest_context": ClaimKind(figures.longest_context, _COUNTED, quick=False),
    "longer_context": ClaimKind(figures.longer_context, _COUNTED, quick=False),
    "layer_all_to_alls": ClaimKind(figures.layer_all_to_alls, _COUNTED),
    "buffers_saved": ClaimKind(figures.buffers_saved, _COUNTED),
}


def claims_of(name: str) -> Iterator[Claim]:
    """Yield all figures of a source, in the order of its file.

    Raises:
        ValueError: There is no such source.
    """
    yield from claims_in(name)
    if "speedups" in published_file(name):
        yield from speedups.speedup_claims()


def computed(claim: Claim) -> Ours | None:
    """Compute ours for a claim; None where it cannot be."""
    if not claim.kind:
        return None
    found = KINDS[claim.kind].work(claim.setting)
    return found if isinstance(found, Ours) else Ours(value=float(found))


def judged_claim(claim: Claim) -> JudgedClaim:
    """Compute ours and judge."""
    return JudgedClaim(claim=claim, ours=computed(claim))
