"""The entry for a user's model: real processes, gradients, placement, refusals."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import strategies
from harness.attention import ContextParallel, attention, context_parallel, run_all
from harness.attention.group import check_device
from harness.attention.layout import owners_of
from harness.errors import PlanError, UnsupportedError
from harness.plan.problem import Dtype, Problem
from harness.plan.sharding import Sharding
from patterns import make_pattern
from tests.support import (
    EVERY_STRATEGY,
    RankError,
    failures,
    problem,
    ranks,
    same_bits,
    tensors,
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def chosen(p: Problem, strategy: str) -> ContextParallel:
    """A value for the pattern and heads of a problem; its cp is that of the process."""
    return context_parallel(
        seqlen=p.seqlen_q,
        seqlen_kv=p.seqlen_kv,
        heads_q=p.heads_q,
        heads_kv=p.heads_kv,
        strategy=strategy,
        pattern=p.pattern,
    )


def locally(cp: ContextParallel, p: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's q, k, v (leaves that want a gradient) and dout."""
    q, k, v, dout = tensors(p)
    q, dout = cp.shard(q), cp.shard(dout)
    k, v = cp.shard(k, keys=True), cp.shard(v, keys=True)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def globally(
    cp: ContextParallel, out: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> dict[str, Tensor]:
    """What all ranks have, in original token order."""
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return {
        "out": cp.unshard(out.detach()),
        "dq": cp.unshard(q.grad),
        "dk": cp.unshard(k.grad, keys=True),
        "dv": cp.unshard(v.grad, keys=True),
    }


# Run on every rank of a pool ----------------------------------------------------------------------


def run_cases(cases: list[tuple[str, Problem]]) -> list[dict[str, Tensor]]:
    answers = []
    for strategy, p in cases:
        cp = chosen(p, strategy)
        q, k, v, dout = locally(cp, p)
        out = cp.attend(q, k, v)
        out.backward(dout)
        assert out.shape == dout.shape
        assert all(x.grad is not None and x.grad.dtype == x.dtype for x in (q, k, v))
        answers.append(globally(cp, out, q, k, v))
    return answers if dist.get_rank() == 0 else []


def interleave(one: tuple[str, Problem], other: tuple[str, Problem]) -> list[dict[str, Tensor]]:
    """Two configurations at once: forward, forward, backward, backward."""
    made = [(chosen(p, strategy), p) for strategy, p in (one, other)]
    local = [locally(cp, p) for cp, p in made]
    outs = [cp.attend(*x[:3]) for (cp, _), x in zip(made, local, strict=True)]
    for out, (_, _, _, dout) in zip(outs, local, strict=True):
        out.backward(dout)
    pairs = zip(made, outs, local, strict=True)
    return [globally(cp, out, *x[:3]) for (cp, _), out, x in pairs]


def disagree(p: Problem) -> str:
    """Rank 1 takes another pattern; then all agree, and the group still works."""
    cp = chosen(p, "ring")
    q, k, v, _ = locally(cp, p)
    other = replace(cp, pattern=make_pattern("full", p.seqlen_q))
    try:
        (other if cp.rank == 1 else cp).attend(q, k, v)
    except PlanError as error:
        cp.attend(q, k, v)
        return str(error)
    return "not noticed"


def plain_function(p: Problem, seqlen: int | None) -> Tensor:
    """`attention` on shards, with the length given or summed."""
    cp = chosen(p, "zigzag")
    q, k, v, _ = locally(cp, p)
    out = attention(q, k, v, strategy="zigzag", pattern=p.pattern.text, seqlen=seqlen)
    return cp.unshard(out.detach())


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding on pairs of neighbouring channels."""
    half = x.shape[-1] // 2
    frequency = 100.0 ** -(torch.arange(half, dtype=x.dtype) / half)
    angle = positions.to(x.dtype)[:, None] * frequency
    even, odd = x[..., ::2], x[..., 1::2]
    turned = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
    return torch.stack(turned, dim=-1).flatten(-2)


def rotate(p: Problem, names: tuple[str, ...], wrongly: bool = False) -> list[Tensor]:
    """Rotate each shard by its own positions, then attend."""
    outs = []
    for strategy in names:
        cp = chosen(p, strategy)
        q, k, v, _ = locally(cp, p)
        positions = torch.arange(q.shape[2]) if wrongly else cp.positions
        out = cp.attend(rotated(q, positions), rotated(k, positions), v)
        outs.append(cp.unshard(out.detach()))
    return outs


def sub_group(p: Problem) -> Tensor | str:
    """Attend in a group of ranks 1 and 0 of three; rank 2 is told that it is no member."""
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        try:
            context_parallel(seqlen=p.seqlen_q, heads_q=p.heads_q, group=group)
        except ValueError as error:
            return str(error)
        return "not noticed"
    cp = context_parallel(
        seqlen=p.seqlen_q,
        heads_q=p.heads_q,
        heads_kv=p.heads_kv,
        pattern=p.pattern,
        strategy="ring",
        group=group,
    )
    q, k, v, _ = locally(cp, p)
    return cp.unshard(cp.attend(q, k, v).detach())


def unfit(p: Problem) -> str:
    """A shard that is a token short is refused at once, by the rank that has it."""
    cp = chosen(p, "ring")
    q, k, v, _ = locally(cp, p)
    try:
        cp.attend(q[:, :, 1:], k, v)
    except ValueError as error:
        return str(error)
    return "not noticed"


def elsewhere(p: Problem) -> str:
    """Tensors on a device that gloo does not reach are refused."""
    cp = chosen(p, "ring")
    q, k, v, _ = (x.to("meta") for x in locally(cp, p))
    try:
        cp.attend(q, k, v)
    except UnsupportedError as error:
        return str(error)
    return "not noticed"


# Real processes -----------------------------------------------------------------------------------

PATTERNS = ("causal", "full", "window:left=5,right=2", "documents:lengths=5+11+7", "star")


def cases_of(cp: int) -> list[tuple[str, Problem]]:
    """Every strategy, patterns in turn, odd shapes; float64 and bfloat16."""
    cases = []
    for index, strategy in enumerate((*EVERY_STRATEGY, "usp:1x2" if cp == 2 else "usp:3x1")):
        for turn in range(2):
            for dtype in (Dtype.FLOAT64, Dtype.BFLOAT16):
                p = problem(
                    PATTERNS[(index + turn * 2) % len(PATTERNS)],
                    23,
                    (6, 2),
                    dims=(8, 8) if turn else (8, 5),
                    batch=1 + turn,
                    dtype=dtype,
                    cp=cp,
                )
                cases.append((strategy, p))
    few = problem("causal", 2, (6, 2), cp=cp)
    cross = problem("causal:align=bottom_right", 19, (6, 2), seqlen_kv=29, cp=cp)
    shrunk = problem("full", 29, (6, 3), seqlen_kv=5, batch=1, cp=cp)
    uneven = problem("causal", 23, (7, 7), batch=1, cp=cp)
    odd = [few, cross, shrunk, uneven]
    return cases + [(s, p) for p in odd for s in ("zigzag", "ulysses", "allgather", "stripe")]


@pytest.mark.parametrize("cp", [2, 3])
def test_gradients_of_real_processes_equal_the_oracle_and_the_local_transport(cp: int) -> None:
    cases = cases_of(cp)
    answers = ranks(cp).run(run_cases, cases)[0]
    complaints = []
    for (strategy, p), got in zip(cases, answers, strict=True):
        complaints += [f"{strategy} {p}: {verdict}" for verdict in failures(p, got)]
        q, k, v, dout = tensors(p)
        expected = dict(run_all(p, strategy, q, k, v, dout=dout).results)
        del expected["lse"]
        if not same_bits(got, expected):
            complaints.append(f"{strategy} {p}: differs from the local transport")
    assert len(answers) == len(cases) >= 48
    assert complaints == []


def test_two_configurations_in_one_process_do_not_influence_each_other() -> None:
    one = ("ulysses", problem("causal", 23, (6, 2), cp=2))
    other = ("usp:2x1", problem("window:left=4", 31, (12, 3), batch=1, cp=2))
    alone = ranks(2).run(run_cases, [one, other])[0]
    together = ranks(2).run(interleave, one, other)[0]
    again = ranks(2).run(interleave, other, one)[0][::-1]
    for expected, first, second in zip(alone, together, again, strict=True):
        assert same_bits(expected, first)
        assert same_bits(expected, second)


def test_ranks_with_different_plans_are_told_and_can_go_on() -> None:
    told = ranks(3).run(disagree, problem("causal", 17, (6, 2), cp=3))
    assert len(set(told)) == 1
    assert "all ranks of a group make one call (rank 1)" in told[0]
    assert "pattern: causal on ranks [0, 2], full on ranks [1]" in told[0]


@pytest.mark.parametrize("given", [False, True])
def test_the_length_of_the_whole_sequence_is_summed_unless_given(given: bool) -> None:
    p = problem("causal", 23, (6, 2), cp=3)
    outs = ranks(3).run(plain_function, p, p.seqlen_q if given else None)
    for out in outs:
        assert failures(p, {"out": out}) == []


def test_rotary_embedding_by_the_positions_of_each_shard_equals_rotating_everything() -> None:
    p = problem("causal", 23, (6, 2), cp=3)
    names = ("ring", "zigzag", "stripe", "ulysses", "usp:3x1")
    q, k, v, _ = tensors(p)
    everywhere = torch.arange(p.seqlen_q)
    q, k = rotated(q, everywhere), rotated(k, everywhere)
    expected = [run_all(p, name, q, k, v).results["out"] for name in names]
    got = ranks(3).run(rotate, p, names)[0]
    for name, one, other in zip(names, expected, got, strict=True):
        assert torch.equal(one, other), name


def test_rotary_embedding_by_local_positions_is_seen_to_be_wrong() -> None:
    p = problem("causal", 23, (6, 2), cp=3)
    right = ranks(3).run(rotate, p, ("zigzag",))[0][0]
    wrong = ranks(3).run(rotate, p, ("zigzag",), True)[0][0]
    assert (right - wrong).abs().max() > 0.1


def test_a_smaller_group_works_and_others_are_refused() -> None:
    p = problem("causal", 23, (6, 2), cp=2)
    first, second, third = ranks(3).run(sub_group, p)
    assert torch.equal(first, second)
    assert failures(p, {"out": first}) == []
    assert third == "attention: this process is not a member of the group"


def test_a_plan_that_cuts_the_sequence_otherwise_than_it_was_dealt_is_refused() -> None:
    cp = context_parallel(seqlen=12, heads_q=2, strategy="ring")
    elsewhere = replace(cp, queries=Sharding((range(5), range(5, 12)), ((0, 1),)))
    q, k, v = (torch.randn(1, 2, 12, 8) for _ in range(3))
    with pytest.raises(PlanError, match=r"match the sharding of the inputs.*ring forward"):
        elsewhere.attend(q, k, v)


def test_a_shard_of_the_wrong_length_is_refused_by_its_rank() -> None:
    told = ranks(2).run(unfit, problem("causal", 17, (6, 2), batch=1, cp=2))
    assert "rank 0 of 2 under ring needs q (1, 6, 8, 8); cut it with shard" in told[0]
    assert "rank 1 of 2 under ring needs q (1, 6, 9, 8); cut it with shard" in told[1]


def test_tensors_on_a_device_that_the_group_does_not_reach_are_refused() -> None:
    told = ranks(2).run(elsewhere, problem("causal", 17, (6, 2), batch=1, cp=2))
    assert told == ["attention: a gloo group moves no meta tensors; try tensors on cpu"] * 2


def test_a_failure_on_a_rank_reaches_the_test() -> None:
    with pytest.raises(RankError, match="seqlen_q"):
        ranks(2).run(chosen, None, "ring")


# One process --------------------------------------------------------------------------------------


def leaves(p: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, dout = tensors(p)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


@pytest.mark.parametrize("strategy", ["ring", "ulysses", "allgather"])
@pytest.mark.parametrize("pattern", ["causal", "window:left=2,right=1"])
def test_gradients_pass_gradcheck_at_one_rank(strategy: str, pattern: str) -> None:
    q, k, v, _ = leaves(problem(pattern, 5, (4, 2), dims=(3, 2), batch=1, cp=1))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, strategy=strategy, pattern=pattern)

    assert torch.autograd.gradcheck(attend, (q, k, v))


@pytest.mark.parametrize("wanting", ["q", "k", "v"])
def test_one_input_alone_may_want_a_gradient(wanting: str) -> None:
    p = problem("causal", 11, (6, 2), dims=(8, 5), cp=1)
    *inputs, dout = tensors(p)
    x = inputs["qkv".index(wanting)].requires_grad_()
    attention(*inputs).backward(dout)
    assert x.grad is not None
    assert failures(p, {f"d{wanting}": x.grad}) == []


def test_without_a_gradient_nothing_is_saved() -> None:
    p = problem("causal", 11, (6, 2), cp=1)
    q, k, v, _ = tensors(p)
    assert not attention(q, k, v).requires_grad


def test_tensors_of_any_strides_are_taken() -> None:
    p = problem("causal", 11, (6, 2), cp=1)
    q, k, v, dout = leaves(p)
    swapped = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert not any(x.is_contiguous() for x in swapped)
    out = attention(q, k, v)
    others = [x.requires_grad_() for x in swapped]
    other = attention(others[0], others[1], others[2])
    out.backward(dout)
    other.backward(dout.transpose(1, 2).contiguous().transpose(1, 2))
    assert torch.equal(out, other)
    for x, y in zip((q, k, v), others, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert torch.equal(x.grad, y.grad)


def test_a_gradient_that_is_one_number_expanded_is_taken() -> None:
    p = problem("causal", 11, (6, 2), cp=1)
    q, k, v, dout = leaves(p)
    attention(q, k, v).sum().backward()
    expected = run_all(p, "zigzag", q.detach(), k.detach(), v.detach(), dout=torch.ones_like(dout))
    assert q.grad is not None
    assert torch.equal(q.grad, expected.results["dq"])


def test_the_output_may_be_changed_in_place_where_no_gradient_is_wanted() -> None:
    q, k, v, _ = tensors(problem("causal", 11, (6, 2), cp=1))
    out = attention(q, k, v)
    twice = attention(q, k, v).mul_(2.0)
    assert torch.equal(twice, 2.0 * out)


def test_the_output_may_be_changed_in_place_where_backward_does_not_read_it() -> None:
    p = problem("causal", 11, (6, 2), cp=1)
    q, k, v, dout = leaves(p)
    attention(q, k, v, strategy="ulysses").mul_(2.0).backward(dout / 2.0)
    assert q.grad is not None
    assert failures(p, {"dq": q.grad}) == []


def test_changing_the_output_in_place_cannot_spoil_a_gradient() -> None:
    q, k, v, _ = leaves(problem("causal", 11, (6, 2), cp=1))
    out = attention(q, k, v)
    out.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"in-?place"):
        out.sum().backward()


def test_a_gradient_of_the_gradient_is_refused() -> None:
    q, k, v, _ = leaves(problem("causal", 11, (6, 2), cp=1))
    out = attention(q, k, v)
    with pytest.raises(UnsupportedError, match="the gradient has no gradient of its own"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


@pytest.mark.parametrize("dropout_p", [0.1, 1.0, -0.5])
def test_dropout_is_refused_with_the_reason(dropout_p: float) -> None:
    q, k, v, _ = tensors(problem("causal", 11, (6, 2), cp=1))
    with pytest.raises(UnsupportedError, match=r"dropout_p .* must be 0: .* random mask"):
        attention(q, k, v, dropout_p=dropout_p)
    with pytest.raises(UnsupportedError, match=r"dropout_p .* must be 0"):
        chosen(problem("causal", 11, (6, 2), cp=1), "ring").attend(q, k, v, dropout_p=dropout_p)


def test_what_is_no_attention_is_refused_with_what_was_received() -> None:
    q, k, v, _ = tensors(problem("causal", 11, (6, 2), dims=(8, 5), cp=1))
    with pytest.raises(ValueError, match=r"k \(2, 11, 8\), .*: each must be \(B, heads"):
        attention(q, k[0], v)
    with pytest.raises(ValueError, match="dtype and device must be one"):
        attention(q, k.float(), v)
    with pytest.raises(ValueError, match=r"needs v \(2, 2, 11, 5\)"):
        attention(q, k, v[:, :, :5])
    with pytest.raises(ValueError, match=r"needs k \(2, 2, 11, 8\)"):
        attention(q, k[..., :3], v)
    with pytest.raises(UnsupportedError, match=r"no attention in torch\.complex64"):
        attention(q.cfloat(), k.cfloat(), v.cfloat())
    with pytest.raises(ValueError, match=r"heads_kv \(4\) must divide heads_q \(6\)"):
        context_parallel(seqlen=11, heads_q=6, heads_kv=4)
    with pytest.raises(ValueError, match=r"must equal seqlen \(12\) x seqlen_kv \(12\)"):
        context_parallel(seqlen=12, heads_q=6, pattern=make_pattern("causal", 11))
    with pytest.raises(ValueError, match=r"strategy \(rign\) is unknown .*choose from"):
        context_parallel(seqlen=12, heads_q=6, strategy="rign")


def test_a_group_that_cannot_reach_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")

    with pytest.raises(UnsupportedError, match=r"a nccl group moves no cpu tensors; try .*gloo"):
        check_device(torch.device("cpu"), dist.GroupMember.NON_GROUP_MEMBER)
    check_device(torch.device("cuda"), dist.GroupMember.NON_GROUP_MEMBER)
    monkeypatch.setattr(dist, "get_backend", lambda _: "cpu:gloo,cuda:nccl")
    check_device(torch.device("cpu"), dist.GroupMember.NON_GROUP_MEMBER)


# Placement ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [*EVERY_STRATEGY, "usp:2x2", "allgather:placement=stripe"])
@pytest.mark.parametrize("seqlen", [2, 23])
def test_shards_cover_the_sequence_and_positions_say_which(strategy: str, seqlen: int) -> None:
    alone = context_parallel(seqlen=seqlen, heads_q=6)
    shape = Problem(pattern=alone.pattern, heads_q=6, heads_kv=6, head_dim=1, cp=4)
    queries, keys = owners_of(strategies.strategy(strategy), shape, alone.context)
    made = [replace(alone, cp=4, rank=rank, queries=queries, keys=keys) for rank in range(4)]
    ids = torch.arange(100, 100 + seqlen)[None]
    parts = [one.shard(ids, dim=1) for one in made]
    for one, part in zip(made, parts, strict=True):
        assert torch.equal(part[0], 100 + one.positions)
    assert sorted(torch.cat(parts, dim=1)[0].tolist()) == list(range(100, 100 + seqlen))


def test_gradients_flow_through_shard_and_unshard() -> None:
    cp = context_parallel(seqlen=5, heads_q=2)
    x = torch.randn(5, 3, requires_grad=True)
    whole = cp.unshard(cp.shard(x, dim=0), dim=0)
    assert torch.equal(whole, x)
    weight = torch.arange(15.0).view(5, 3)
    (whole * weight).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, weight)


def gathered_gradient(names: tuple[str, ...], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Each rank weighs the whole by another number; its part's gradient and its positions."""
    found = []
    for name in names:
        cp = context_parallel(seqlen=23, heads_q=6, strategy=name)
        part = torch.ones(2, len(cp.positions), 7, dtype=dtype, requires_grad=True)
        by_token = (torch.arange(23) + 100 * (cp.rank + 1)).to(dtype)
        (cp.unshard(part, dim=1) * by_token[:, None]).sum().backward()
        assert part.grad is not None
        found.append((part.grad, cp.positions))
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_unshard_sums_the_gradients_of_all_ranks(dtype: torch.dtype) -> None:
    for answers in ranks(3).run(gathered_gradient, ("zigzag", "stripe", "ring"), dtype):
        for grad, positions in answers:
            each = [(positions + 100 * (rank + 1)).to(dtype).double() for rank in range(3)]
            expected = sum(each[1:], each[0]).to(dtype)
            assert torch.equal(grad, expected[None, :, None].expand(2, -1, 7))


def test_positions_are_made_once_and_again_after_a_change() -> None:
    cp = context_parallel(seqlen=37, heads_q=6, strategy="stripe")
    first = cp.positions
    assert cp.positions is first
    first += 1
    assert torch.equal(cp.positions, torch.arange(37))
    with torch.inference_mode():
        assert torch.equal(context_parallel(seqlen=5, heads_q=2).positions, torch.arange(5))
    assert replace(cp, queries=Sharding((range(37),), ((0,),))).positions is not cp.positions


# Plans made ahead ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lse", [False, True])
def test_what_was_prepared_is_not_planned_in_the_step(
    lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = f"documents:lengths=9+{11 + lse}+{17 - lse}"  # planned by no other test
    cp = context_parallel(seqlen=37, heads_q=6, heads_kv=2, pattern=pattern)
    asked = {"scale": 0.3, "softcap": 0.7}
    cp.prepare(head_dim=8, head_dim_v=5, batch=2, dtype=torch.float64, lse=lse, **asked)

    def too_late(*_: object) -> None:
        raise AssertionError("planned in the step")

    monkeypatch.setattr("harness.proved.plans.verify", too_late)
    q, k, v, dout = leaves(problem(pattern, 37, (6, 2), dims=(8, 5), cp=1))
    if lse:
        out, sums = cp.attend(q, k, v, lse=True, **asked)
        torch.autograd.backward([out, sums], [dout, torch.ones_like(sums)])
    else:
        cp.attend(q, k, v, **asked).backward(dout)
    with pytest.raises(AssertionError, match="planned in the step"):
        cp.attend(q, k, v, scale=0.4)


def test_what_cannot_be_attended_cannot_be_prepared() -> None:
    cp = context_parallel(seqlen=37, heads_q=6, heads_kv=2)
    with pytest.raises(UnsupportedError, match=r"prepare: there is no attention in torch\.int64"):
        cp.prepare(head_dim=8, dtype=torch.int64)


def test_an_axis_that_holds_no_tokens_is_refused() -> None:
    cp = context_parallel(seqlen=5, heads_q=2)
    with pytest.raises(ValueError, match=r"axis 2 of \(1, 5, 4\) must hold the 5 tokens"):
        cp.shard(torch.zeros(1, 5, 4))
    with pytest.raises(ValueError, match=r"axis 2 of \(1, 5, 4\) must hold the 5 tokens"):
        cp.unshard(torch.zeros(1, 5, 4))
