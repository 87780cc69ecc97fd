"""strategy="auto": one choice on all ranks, and the bits of the strategy that it names."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.attention import attention, automatic, context_parallel
from harness.recommend.automatic import automatic as recommended
from harness.records.defaults import usual
from tests.support import RankError, ranks

TOKENS = 101


def results(strategy: str) -> tuple[str, list[Tensor]]:
    """The strategy that ran, its output here and all gradients."""
    cp = context_parallel(strategy=strategy, pattern="causal", seqlen=TOKENS, heads_q=6, heads_kv=2)
    made = torch.Generator().manual_seed(3)
    whole = (torch.randn(2, heads, TOKENS, 16, generator=made) for heads in (6, 2, 2))
    q, k, v = (cp.shard(x, dim=2).clone().requires_grad_() for x in whole)
    out = cp.attend(q, k, v)
    out.square().sum().backward()
    return cp.strategy.text, [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def same_bits() -> str:
    """Run auto, then what it named; returns that name."""
    name, ours = results("auto")
    again, theirs = results(name)
    assert name == again
    assert len(ours) == len(theirs) == 4
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    return name


def told() -> str:
    """Rank 0 chooses what no other rank would."""
    rank = dist.get_rank()
    automatic.automatic = lambda *_: "stripe" if rank == 0 else "nobody's"
    try:
        return results("auto")[0]
    finally:
        automatic.automatic = recommended


def other_problems() -> None:
    rank = dist.get_rank()
    context_parallel(strategy="auto", seqlen=TOKENS + rank, heads_q=6, heads_kv=2)


def refused() -> None:
    context_parallel(strategy="auto", seqlen=TOKENS, seqlen_kv=7, heads_q=6, heads_kv=2)


@pytest.mark.parametrize("cp", [2, 4])
def test_all_ranks_choose_alike_and_get_the_bits_of_the_named_strategy(cp: int) -> None:
    names = ranks(cp).run(same_bits)
    assert len(names) == cp
    assert len(set(names)) == 1
    assert names[0] != "auto"


def test_rank_0_chooses_for_all() -> None:
    assert ranks(2).run(told) == ["stripe", "stripe"]


def test_ranks_that_ask_for_different_problems_are_told() -> None:
    with pytest.raises(RankError, match=r"seqlen_q: 101 on ranks .0., 102 on ranks .1."):
        ranks(2).run(other_problems)


def test_what_cannot_be_recommended_is_refused_on_every_rank() -> None:
    with pytest.raises(RankError, match=r"auto: pattern(?s:.*)rank 1(?s:.*)auto: pattern"):
        ranks(2).run(refused)


def test_alone_any_strategy_will_do() -> None:
    cp = context_parallel(strategy="auto", seqlen=TOKENS, heads_q=6)
    assert cp.cp == 1


def test_tensors_that_are_cut_already_have_a_strategy() -> None:
    x = torch.ones(1, 2, 5, 8)
    with pytest.raises(ValueError, match="cut already"):
        attention(x, x, x, strategy="auto", seqlen=5)


def test_nothing_is_timed_in_choosing() -> None:
    from harness.cluster.presets import cluster

    machine = cluster("h100-hamming")
    asked = usual("causal", 3, 3000, 7, 1)
    first = recommended(asked, machine, machine.name)
    recommended.cache_clear()
    assert recommended(asked, machine, machine.name) == first
