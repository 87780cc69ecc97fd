"""The tolerance passes what is right and fails what real projects got wrong."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from harness.execute.kernels import (
    Mask,
    MaskKind,
    accumulator_dtype,
    attend_backward,
    attend_call,
    merge_,
)
from harness.oracle.tolerance import Tolerance, Verdict, calibrate, errors, judge, limit, widest

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
BATCH, HEADS, HEADS_KV, ROWS, COLS, DIM, DIM_V = 2, 6, 2, 72, 96, 32, 24
SCALE = DIM**-0.5
PARTS = (range(24), range(24, 48), range(48, 72), range(72, 96))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def random(cls, dtype: torch.dtype, seed: int) -> "Problem":
        rng = torch.Generator().manual_seed(seed)
        q, k, v, dout = (
            torch.randn(size, generator=rng, dtype=torch.float64).to(dtype)
            for size in (
                (BATCH, HEADS, ROWS, DIM),
                (BATCH, HEADS_KV, COLS, DIM),
                (BATCH, HEADS_KV, COLS, DIM_V),
                (BATCH, HEADS, ROWS, DIM_V),
            )
        )
        return cls(q=q, k=k, v=v, dout=dout)


def allowed_of(causal: bool) -> Tensor:
    """Causal is aligned at the end, so that every part of the keys has something to hide."""
    every = torch.ones(ROWS, COLS, dtype=torch.bool)
    return every.tril(COLS - ROWS) if causal else every


def run_in_parts(p: Problem, *, causal: bool, bug: str = "") -> dict[str, Tensor]:
    """Attend to the keys part by part, as one rank of a ring does; `bug` names what goes wrong."""
    acc = accumulator_dtype(p.q.dtype)
    queries = range(COLS - ROWS, COLS)
    parts = [(p.k[:, :, c.start : c.stop], p.v[:, :, c.start : c.stop]) for c in PARTS]
    masks = [
        Mask(MaskKind.BAND, queries, c, lo=0)
        if causal and bug != "missing causal"
        else Mask(MaskKind.FULL, queries, c)
        for c in PARTS
    ]
    if bug == "swapped KV":
        parts[1], parts[2] = parts[2], parts[1]
    if bug == "keys and values of different parts":
        parts[1], parts[2] = (parts[1][0], parts[2][1]), (parts[2][0], parts[1][1])
    heads = list(range(HEADS))
    if bug == "wrong head order":  # h % G in place of h // (H / G)
        heads = [h for g in range(HEADS_KV) for h in range(g, HEADS, HEADS_KV)]
    q, dout = p.q[:, heads], p.dout[:, heads]
    out_acc = torch.zeros(dout.shape, dtype=acc)
    lse = torch.full(dout.shape[:3], -math.inf, dtype=acc)
    for step, ((k, v), mask) in enumerate(zip(parts, masks, strict=True)):
        part = attend_call(q, k, v, mask, SCALE)
        if bug == "dropped merge" and step == 2:
            continue
        if bug == "part merged twice" and step == 2:
            merge_(out_acc, lse, *part)
        if bug == "lse in base 2":
            part = (part[0], part[1] / math.log(2))
        if bug == "lse in bfloat16":
            part = (part[0], part[1].bfloat16().to(acc))
        merge_(out_acc, lse, *part)
    out = out_acc.to(p.q.dtype)
    dq = torch.zeros(q.shape, dtype=acc)
    dk, dv = [], []
    for step, ((k, v), mask) in enumerate(zip(parts, masks, strict=True)):
        if bug == "stale KV" and step == 2:
            k, v = parts[1]  # noqa: PLW2901  # the buffer still holds the part before
        own = (
            (*attend_call(q, k, v, mask, SCALE),) if bug == "lse of the part alone" else (out, lse)
        )
        grads = attend_backward(dout, q, k, v, *own, mask, SCALE)
        dq += grads[0]
        dk.append(grads[1])
        dv.append(grads[2])
    home = torch.tensor(heads).argsort()
    result = {
        "out": out[:, home],
        "lse": lse[:, home],
        "dq": dq[:, home].to(p.q.dtype),
        "dk": torch.cat(dk, dim=2),
        "dv": torch.cat(dv, dim=2),
    }
    if bug.startswith("zero "):
        result[bug.removeprefix("zero ")].zero_()
    if bug == "one wrong key":
        result["dk"][0, 1, 17] = result["dk"][0, 1, 18]
    return result


# Each with the tensors that must be found wrong.
BUGS = {
    "zero out": {"out"},
    "zero dq": {"dq"},
    "zero dk": {"dk"},
    "zero dv": {"dv"},
    "wrong head order": {"out", "lse", "dq", "dk", "dv"},
    "missing causal": {"out", "lse", "dq", "dk", "dv"},
    "swapped KV": {"out", "lse", "dk", "dv"},
    "keys and values of different parts": {"out", "dq", "dk"},
    "dropped merge": {"out", "lse"},
    "part merged twice": {"out", "lse"},
    "stale KV": {"dq", "dk", "dv"},
    "lse in base 2": {"out", "lse"},
    "lse in bfloat16": {"lse"},
    "lse of the part alone": {"dq", "dk", "dv"},
    "one wrong key": {"dk"},
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_right_results_pass_and_every_bug_fails(dtype: torch.dtype, seed: int) -> None:
    p = Problem.random(dtype, seed)
    tolerance = calibrate(p.q, p.k, p.v, allowed_of(True), scale=SCALE, dout=p.dout)
    merges = len(PARTS) - 1
    verdicts = judge(run_in_parts(p, causal=True), tolerance, merges=merges)

    assert all(v.passed for v in verdicts), [str(v) for v in verdicts]
    for bug, tensors in BUGS.items():
        verdicts = judge(run_in_parts(p, causal=True, bug=bug), tolerance, merges=merges)
        found = {v.name for v in verdicts if not v.passed}

        assert tensors <= found, (bug, [str(v) for v in verdicts])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bugs_are_found_without_a_mask_too(dtype: torch.dtype) -> None:
    p = Problem.random(dtype, 3)
    tolerance = calibrate(p.q, p.k, p.v, allowed_of(False), scale=SCALE, dout=p.dout)
    merges = len(PARTS) - 1

    assert all(v.passed for v in judge(run_in_parts(p, causal=False), tolerance, merges=merges))
    for bug in ("zero out", "zero dq", "zero dk", "zero dv", "dropped merge", "stale KV"):
        verdicts = judge(run_in_parts(p, causal=False, bug=bug), tolerance, merges=merges)
        found = {v.name for v in verdicts if not v.passed}

        assert BUGS[bug] - {"lse"} <= found, (bug, [str(v) for v in verdicts])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_zeros_do_not_pass_for_a_long_softmax(dtype: torch.dtype) -> None:
    """The output of many keys is small beside v; a limit that forgets it finds zeros right."""
    rng = torch.Generator().manual_seed(5)
    q, dout = (torch.randn((1, 2, 5, 16), generator=rng).to(dtype) for _ in range(2))
    k, v = (torch.randn((1, 1, 60_000, 16), generator=rng).to(dtype) for _ in range(2))
    every = torch.ones(5, 60_000, dtype=torch.bool)
    tolerance = calibrate(q, k, v, every, scale=0.25, dout=dout)
    zeros = {name: torch.zeros_like(x) for name, x in tolerance.reference.items()}

    assert not any(v.passed for v in judge(zeros, tolerance, merges=7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gain", [1.0, 10.0])
def test_a_gradient_that_cancels_is_judged_by_its_terms(dtype: torch.dtype, gain: float) -> None:
    """With one key, or with one that takes all weight, dq and dk are zero but for rounding."""
    rng = torch.Generator().manual_seed(6)
    q, dout = (torch.randn((1, 4, 33, 64), generator=rng).to(dtype) for _ in range(2))
    k, v = (torch.randn((1, 2, 1, 64), generator=rng).to(dtype) for _ in range(2))
    q = q * gain
    every = torch.ones(33, 1, dtype=torch.bool)
    mask = Mask(MaskKind.FULL, range(33), range(1))
    tolerance = calibrate(q, k, v, every, scale=0.125, dout=dout)
    out, lse = attend_call(q, k, v, mask, 0.125)
    grads = attend_backward(dout, q, k, v, out, lse, mask, 0.125)
    result = {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), grads, strict=True))

    assert all(v.passed for v in judge(result, tolerance)), [
        str(v) for v in judge(result, tolerance)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_sharp_scores_are_judged_by_the_size_of_their_lse(seed: int) -> None:
    """A weight is `exp(score - lse)`: in float32, an lse of 60 is rounded to 4e-6."""
    p = Problem.random(torch.float32, seed)
    q = 30 * p.q
    tolerance = calibrate(q, p.k, p.v, allowed_of(True), scale=SCALE, dout=p.dout)
    mask = Mask(MaskKind.BAND, range(COLS - ROWS, COLS), range(COLS), lo=0)
    out, lse = attend_call(q, p.k, p.v, mask, SCALE)
    grads = attend_backward(p.dout, q, p.k, p.v, out, lse, mask, SCALE)
    result = {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), grads, strict=True))

    assert all(v.passed for v in judge(result, tolerance)), [
        str(v) for v in judge(result, tolerance)
    ]


def forward_tolerance() -> tuple[Problem, Tolerance]:
    p = Problem.random(torch.float32, 0)
    allowed = allowed_of(True)
    allowed[7] = False
    return p, calibrate(p.q, p.k, p.v, allowed, scale=SCALE)


def test_a_nan_or_a_misplaced_infinity_is_an_infinite_error() -> None:
    _, tolerance = forward_tolerance()
    ref = tolerance.reference

    assert errors(ref, tolerance) == {"out": 0.0, "lse": 0.0}
    for name, place, value in (
        ("out", (0, 0, 0, 0), math.nan),
        ("lse", (0, 0, 0), math.nan),
        ("lse", (0, 0, 0), -math.inf),
        ("lse", (0, 0, 7), 0.0),
        ("lse", (0, 0, 7), math.inf),
    ):
        wrong = {n: x.clone() for n, x in ref.items()}
        wrong[name][place] = value

        assert errors(wrong, tolerance)[name] == math.inf, (name, value)
        assert not all(v.passed for v in judge(wrong, tolerance))


def test_an_error_is_relative_to_its_scale() -> None:
    _, tolerance = forward_tolerance()
    ref = tolerance.reference
    off = errors({"out": ref["out"] + 0.5, "lse": ref["lse"] + 0.5}, tolerance)

    assert off["out"] == pytest.approx(0.5 / tolerance.scales["out"])
    assert off["lse"] == pytest.approx(0.5 / tolerance.scales["lse"])
    assert tolerance.scales["lse"] == float(ref["lse"][ref["lse"].isfinite()].abs().max())


def test_limits_grow_with_merges_and_coarser_dtypes_only() -> None:
    _, tolerance = forward_tolerance()
    p64 = Problem.random(torch.float64, 0)
    exact = calibrate(p64.q, p64.k, p64.v, allowed_of(True), scale=SCALE)
    p16 = Problem.random(torch.bfloat16, 0)
    coarse = calibrate(p16.q, p16.k, p16.v, allowed_of(True), scale=SCALE)

    assert limit("out", exact, merges=99) == limit("lse", exact) == 1e-12
    assert limit("out", tolerance) < limit("out", tolerance, merges=1) < limit("out", coarse)
    assert limit("lse", coarse, merges=3) < 2**-10  # half a unit of bfloat16 is 2 ** -9


def test_names_and_shapes_that_the_oracle_has_not_are_refused() -> None:
    p, tolerance = forward_tolerance()
    with pytest.raises(ValueError, match="no reference for 'dq'"):
        errors({"dq": p.q}, tolerance)
    with pytest.raises(ValueError, match="the oracle's is"):
        errors({"out": tolerance.reference["out"][:, 1:]}, tolerance)


def test_nothing_to_compare_is_no_error() -> None:
    q, k = torch.zeros(1, 2, 0, 8), torch.zeros(1, 1, 5, 8)
    tolerance = calibrate(q, k, k, torch.ones(0, 5, dtype=torch.bool), scale=1.0, dout=q)

    assert set(errors(tolerance.reference, tolerance).values()) == {0.0}


def test_only_zeros_are_right_where_no_query_meets_a_key() -> None:
    p = Problem.random(torch.bfloat16, 0)
    nothing = torch.zeros(ROWS, COLS, dtype=torch.bool)
    tolerance = calibrate(p.q, p.k, p.v, nothing, scale=SCALE, dout=p.dout)
    wrong = {"out": 0 * p.dout, "dq": 1e-9 + 0 * p.q}

    assert set(errors(tolerance.reference, tolerance).values()) == {0.0}
    assert errors(wrong, tolerance) == {"out": 0.0, "dq": math.inf}


def test_a_verdict_prints_both_numbers() -> None:
    p, tolerance = forward_tolerance()
    verdict = judge({"out": torch.zeros_like(p.q[..., :DIM_V])}, tolerance)[0]

    assert str(verdict) == f"out: error {verdict.error:.2e}, limit {verdict.limit:.2e}"
    assert not verdict.passed


def test_verdicts_on_several_inputs_join_by_tensor() -> None:
    first = Verdict(name="dq", error=0.25, limit=0.5)
    worse, other = replace(first, error=0.75, limit=0.25), replace(first, name="dk")
    joined = widest([first, other, worse])
    assert joined == {"dq": replace(first, error=0.75), "dk": other}
    assert not joined["dq"].passed
    assert joined["dk"].passed
    assert not replace(first, error=math.inf).passed
