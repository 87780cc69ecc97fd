"""A scale, a cap, slopes and sinks, and lse with its gradient: equal to the oracle everywhere."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from harness.attention import alibi_slopes, context_parallel, run_all
from harness.attention.lse_gradient import widened, with_dlse
from harness.errors import PlanError
from harness.execute import scored
from harness.oracle.dense import Scores
from harness.oracle.tolerance import Tolerance, Verdict, calibrate, judge
from harness.plan.plan import to_json
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.reader import from_json
from harness.plan.tasks import Tensor as Name
from strategies import quick, strategy
from tests.support import allowed, problem, ranks, tensors

SLOPES = (0.5, 0.25, 0.0, 0.125, 1.0, 0.0625)
STRATEGIES = ("ring", "zigzag", "stripe", "ulysses", "usp:2x2", "allgather", "grid:rows=2")


def gradient_of_lse(p: Problem) -> Tensor:
    rng = torch.Generator().manual_seed(5)
    shape = (p.batch, p.heads_q, p.seqlen_q)
    drawn = torch.randn(shape, generator=rng, dtype=torch.float64)
    return drawn.to(torch.float64 if p.dtype is Dtype.FLOAT64 else torch.float32)


def oracle(p: Problem, dlse: Tensor | None = None, sinks: Tensor | None = None) -> Tolerance:
    q, k, v, dout = tensors(p)
    alibi = None if p.alibi is None else torch.tensor(p.alibi, dtype=torch.float64)
    scores = Scores(softcap=p.softcap, alibi=alibi, sinks=sinks)
    scale = p.head_dim**-0.5 if p.scale is None else p.scale
    given = {"scale": scale, "dout": dout, "dlse": dlse, "scores": scores}
    return calibrate(q, k, v, allowed(p), **given)


def failed(p: Problem, results: dict[str, Tensor], right: Tolerance) -> list[Verdict]:
    return [each for each in judge(results, right, merges=p.cp) if not each.passed]


def wrong(p: Problem, name: str, dlse: Tensor | None = None) -> list[Verdict]:
    """Run all ranks in this process; what differs from the oracle."""
    q, k, v, dout = tensors(p)
    results = dict(run_all(p, name, q, k, v, dout=dout, dlse=dlse).results)
    return failed(p, results, oracle(p, dlse))


CHANGES = {
    "scale": {"scale": 0.21},
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi": SLOPES},
    "all": {"scale": 0.9, "softcap": 1.3, "alibi": SLOPES},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "pattern", ["causal", "window:left=9,right=2", "documents:lengths=11+19+7"]
)
def test_changed_scores_equal_the_oracle(change: str, pattern: str) -> None:
    for name in STRATEGIES:
        base = problem(pattern, 37, (6, 2), dims=(8, 5), cp=4)
        assert wrong(replace(base, **CHANGES[change]), name) == [], name


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16])
@pytest.mark.parametrize("change", ["softcap", "all"])
def test_changed_scores_in_low_precision(change: str, dtype: Dtype) -> None:
    for cp, name in ((1, "ring"), (2, "zigzag"), (3, "ulysses")):
        base = problem("causal", 37, (6, 2), dims=(8, 5), dtype=dtype, cp=cp)
        assert wrong(replace(base, **CHANGES[change]), name) == [], name


def test_a_long_call_is_cut_into_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scored, "_SCORES", 1)
    p = replace(problem("causal", 300, (6, 2), dims=(8, 5), cp=1), softcap=0.7, alibi=SLOPES)
    assert wrong(p, "ring") == []


@pytest.mark.parametrize("pattern", ["causal", "documents:lengths=11+19,padding=7"])
def test_the_gradient_of_lse_equals_the_oracle(pattern: str) -> None:
    for name in STRATEGIES:
        p = problem(pattern, 37, (6, 2), dims=(8, 5), cp=4)
        assert wrong(p, name, gradient_of_lse(p)) == [], name


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16])
def test_the_gradient_of_lse_in_low_precision(dtype: Dtype) -> None:
    for cp, name in ((1, "ring"), (2, "ulysses"), (4, "grid:rows=2")):
        p = problem("causal", 37, (6, 2), dims=(8, 5), dtype=dtype, cp=cp)
        assert wrong(p, name, gradient_of_lse(p)) == [], name


def test_a_gradient_of_lse_beyond_float16_stays_finite() -> None:
    """Gradients are linear in it: what 2 ** 18 times as large a one gives is divided again."""
    p = problem("full", 37, (6, 2), dims=(8, 5), dtype=Dtype.FLOAT16, cp=1)
    q, k, v, dout = tensors(p)
    q, k, dout = q / 64, k / 64, torch.zeros_like(dout)  # so that what a kernel holds fits
    dlse = gradient_of_lse(p)
    found = run_all(p, "ring", q, k, v, dout=dout, dlse=dlse * 2**18).results
    grads = {name: found[name].double() / 2**18 for name in ("dq", "dk", "dv")}
    right = calibrate(q, k, v, allowed(p), scale=8**-0.5, dout=dout, dlse=dlse)
    assert failed(p, grads, right) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gradient_of_lse_keeps_the_bits_of_float32(dtype: torch.dtype) -> None:
    dlse = torch.tensor([1e-2, -1.2345678, 7654.321, 65519.7, -3.3e8, 2.1e9])[None, None]
    columns = with_dlse(torch.zeros(1, 1, 6, 5, dtype=dtype), dlse)
    constants = widened(Name.OUT, torch.zeros(1, 1, 6, 5, dtype=dtype))
    total = (columns.double() * constants.double()).sum(dim=-1)
    assert ((total + dlse) / dlse).abs().max() < 2**-22


# Real processes -----------------------------------------------------------------------------------


def over_ranks(cases: list[tuple[str, Problem]]) -> list[dict[str, Tensor]]:
    """Attend with sinks and lse, both with gradients; what all ranks have together."""
    found = []
    for name, p in cases:
        cp = context_parallel(
            seqlen=p.seqlen_q,
            heads_q=p.heads_q,
            heads_kv=p.heads_kv,
            strategy=name,
            pattern=p.pattern,
        )
        q, k, v, dout = (cp.shard(x) for x in tensors(p))
        dlse, sinks = cp.shard(gradient_of_lse(p)), sinks_of(p)
        for x in (q, k, v, sinks):
            x.requires_grad_()
        asked = {"scale": p.scale, "softcap": p.softcap, "alibi": p.alibi}
        out, lse = cp.attend(q, k, v, sinks=sinks, lse=True, **asked)
        torch.autograd.backward([out, lse], [dout, dlse])
        assert sinks.grad is not None
        total = sinks.grad.clone()
        if cp.group is not None:
            torch.distributed.all_reduce(total)
        gathered = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
        alone = cp.attend(q, k, v, sinks=sinks, **asked)
        assert torch.equal(alone, out)
        found.append(
            {each: cp.unshard(x) for each, x in gathered.items() if x is not None}
            | {"lse": cp.unshard(lse.detach()), "dsinks": total}
        )
    return found


def sinks_of(p: Problem) -> Tensor:
    found = torch.linspace(-1.0, 2.0, p.heads_q, dtype=torch.float64)
    return found if p.dtype is Dtype.FLOAT64 else found.float()


@pytest.mark.parametrize("cp", [1, 2])
def test_sinks_and_lse_with_their_gradients_equal_the_oracle(cp: int) -> None:
    names = ("zigzag", "ulysses", "allgather", *(("usp:1x2",) if cp == 2 else ()))
    cases = []
    for name in names:
        base = problem("causal", 23, (6, 2), dims=(8, 5), cp=cp)
        padded = problem("documents:lengths=9+11,padding=3", 23, (6, 2), dims=(8, 5), cp=cp)
        cases += [(name, replace(padded, **CHANGES["all"]))]
        cases += [(name, replace(base, dtype=Dtype.BFLOAT16))]
    if cp == 2:
        small = problem("star", 19, (2, 1), dims=(8, 5), batch=1, cp=2)
        cases.append((quick("ultraattn"), replace(small, softcap=0.7)))
    answers = over_ranks(cases) if cp == 1 else ranks(cp).run(over_ranks, cases)[0]
    for (name, p), got in zip(cases, answers, strict=True):
        right = oracle(p, gradient_of_lse(p), sinks_of(p))
        assert failed(p, got, right) == [], (name, p)


def differ(p: Problem, case: str) -> str:
    cp = context_parallel(seqlen=p.seqlen_q, heads_q=6, heads_kv=2, strategy="ulysses")
    q, k, v, _ = (cp.shard(x).requires_grad_() for x in tensors(p))
    try:
        match case:
            case "scale":
                cp.attend(q, k, v, scale=0.3 if cp.rank else 0.4)
            case "lse":
                cp.attend(q, k, v, lse=bool(cp.rank))
            case "gradient":
                out, lse = cp.attend(q, k, v, lse=True)
                (lse if cp.rank else out).sum().backward()
    except PlanError as error:
        return str(error)
    return "not noticed"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("scale", "scale: 0.4 on ranks [0], 0.3 on ranks [1]"),
        ("lse", "call: attend forward on ranks [0], attend forward with lse on ranks [1]"),
        ("gradient", "head_dim_v: 5 on ranks [0], 6 on ranks [1]"),
    ],
)
def test_ranks_that_ask_for_different_scores_are_told(case: str, message: str) -> None:
    p = problem("causal", 23, (6, 2), dims=(8, 5), cp=2)
    for told in ranks(2).run(differ, p, case):
        assert message in told


# Identity and refusals ----------------------------------------------------------------------------


def test_a_problem_says_only_what_it_changes() -> None:
    plain = problem("causal", 37, (6, 2), cp=2)
    usual = replace(plain, scale=8**-0.5)
    assert usual == plain
    changed = replace(plain, scale=0.3, softcap=2, alibi=SLOPES)
    plans = [strategy("ring").plan(p, Direction.FORWARD) for p in (plain, usual, changed)]
    assert plans[0].hash == plans[1].hash != plans[2].hash
    assert "scale" not in to_json(plans[0])
    assert from_json(to_json(plans[2])).problem == changed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": -0.5}, "scale .* above 0; turn the sign of q"),
        ({"scale": float("nan")}, "scale .* finite"),
        ({"softcap": 0.0}, "softcap .* above 0"),
        ({"alibi": (0.5,)}, "one finite slope for each of 6 heads"),
        ({"sinks": torch.zeros(2)}, r"sinks \(2,\) .* logit for each query head, \(6,\)"),
        ({"alibi": torch.zeros(6, requires_grad=True)}, r"alibi has no gradient"),
    ],
)
def test_what_scores_cannot_be_is_refused(options: dict[str, object], message: str) -> None:
    p = problem("causal", 11, (6, 2), cp=1)
    q, k, v, _ = tensors(p)
    cp = context_parallel(seqlen=11, heads_q=6, heads_kv=2)
    with pytest.raises(ValueError, match=message):
        cp.attend(q, k, v, **options)  # type: ignore[call-overload]


def test_slopes_of_the_paper() -> None:
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    # 6 heads: those of 4, then the first and third of 8.
    assert alibi_slopes(6) == (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3)


def test_lse_alone_may_have_a_gradient() -> None:
    p = problem("causal", 11, (6, 2), dims=(8, 5), batch=1, cp=1)
    q, k, v, _ = tensors(p)
    q.requires_grad_()
    cp = context_parallel(seqlen=11, heads_q=6, heads_kv=2)
    _, lse = cp.attend(q, k, v, lse=True)
    lse.sum().backward()
    right = oracle(p, torch.ones_like(lse)).reference["dq"] - oracle(p).reference["dq"]
    assert q.grad is not None
    assert (q.grad - right).abs().max() < 1e-12
