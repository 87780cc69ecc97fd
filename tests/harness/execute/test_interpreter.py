"""The interpreter on the local transport: odd shapes, bytes, repeatability, and mutants."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import strategies
from harness.attention import run_all
from harness.errors import PlanError, UnsupportedError
from harness.execute import kernels, shards
from harness.execute.interpreter import execute
from harness.execute.kernels import Mask, MaskKind
from harness.execute.transport import Handle, LocalTransport
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.residency import Program
from harness.plan.sizes import leg_bytes
from harness.plan.tasks import Resident, legs_of
from harness.plan.tasks import Tensor as Kind
from harness.verify.proof import verify
from tests.support import (
    EVERY_STRATEGY,
    failures,
    problem,
    run,
    same_bits,
    tensors,
    wrong,
)

VARIANTS = (*EVERY_STRATEGY, "usp:2x2", "allgather:placement=zigzag", "ulysses:prune=false")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def programs(p: Problem, strategy: str) -> tuple[Program, Program]:
    chosen = strategies.strategy(strategy)
    return (
        verify(chosen.plan(p, Direction.FORWARD)),
        verify(chosen.plan(p, Direction.BACKWARD)),
    )


def forward_inputs(p: Problem, plan: Plan) -> dict[Resident, Tensor]:
    q, k, v, _ = tensors(p)
    return shards.initial_inputs(plan, {Kind.Q: q, Kind.K: k, Kind.V: v}, range(p.cp))


def backward_inputs(
    p: Problem, plan: Plan, saved: Mapping[Resident, Tensor]
) -> dict[Resident, Tensor]:
    dout = tensors(p)[3]
    return {
        resident: saved[resident] if resident in saved else shards.take(plan, dout, resident.piece)
        for resident in plan.initial
    }


# Against the oracle -------------------------------------------------------------------------------

ODD = {
    "fewer tokens than ranks": problem("causal", 2, (6, 2), cp=3),
    "one token": problem("causal", 1, (6, 3), cp=3),
    "one token, seen by all of many queries": problem("full", 13, (6, 2), seqlen_kv=1, cp=4),
    "one query of many keys": problem("full", 1, (6, 2), seqlen_kv=13, cp=4),
    "more chunks than tokens": problem("full", 7, (6, 2), cp=6),
    "lengths that divide nothing": problem("causal", 23, (6, 2), dims=(8, 5), cp=4),
    "documents across the edges of shards": problem("documents:lengths=5+11+7", 23, (6, 2), cp=4),
    "documents of one token": problem("documents:lengths=1+1+1+20", 23, (6, 2), cp=4),
    "documents without a mask": problem("documents:lengths=5+11+7,mask=full", 23, (6, 2), cp=4),
    "each token sees itself": problem("window:left=0,right=0", 23, (6, 2), cp=4),
    "a window shorter than a shard": problem("window:left=3", 24, (6, 2), cp=4),
    "a window as long as a shard": problem("window:left=6", 24, (6, 2), cp=4),
    "a window longer than a shard": problem("window:left=7,right=7", 24, (6, 2), cp=4),
    "a window longer than the sequence": problem("window:left=99", 23, (6, 2), cp=4),
    "keys that are not queries, top left": problem("causal", 19, (6, 2), seqlen_kv=29, cp=4),
    "keys that are not queries, bottom right": problem(
        "causal:align=bottom_right", 19, (6, 2), seqlen_kv=29, cp=4
    ),
    "rows that see no key": problem(
        "causal:align=bottom_right", 29, (6, 2), seqlen_kv=19, batch=1, cp=4
    ),
    "keys that no row sees": problem("causal", 11, (6, 2), seqlen_kv=29, batch=1, cp=4),
    "values wider than keys": problem("causal", 23, (6, 2), dims=(5, 12), cp=4),
    "28 heads on 8 ranks": problem("causal", 19, (28, 4), dims=(4, 4), batch=1, cp=8),
    "30 heads on 4 ranks": problem("causal", 19, (30, 30), dims=(4, 4), batch=1, cp=4),
    "40 heads on 16 ranks": problem("causal", 37, (40, 8), dims=(4, 4), batch=1, cp=16),
    "one KV head": problem("causal", 23, (8, 1), cp=4),
    "sparse tables": problem("star", 41, (6, 2), batch=1, cp=4),
    "strides": problem("strided", 41, (6, 2), batch=1, cp=4),
    "sinks": problem("streaming", 41, (6, 2), batch=1, cp=4),
}


@pytest.mark.parametrize("strategy", VARIANTS)
@pytest.mark.parametrize("case", ODD)
def test_every_strategy_equals_the_oracle_forward_and_backward(case: str, strategy: str) -> None:
    p = ODD[case]
    if strategy == "usp:2x2":
        p = replace(p, cp=4)
    assert wrong(p, strategy) == ""


@pytest.mark.parametrize("strategy", VARIANTS)
@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16])
def test_every_precision_is_within_its_tolerance(dtype: Dtype, strategy: str) -> None:
    for pattern in ("causal", "window:left=5,right=2", "full"):
        p = problem(pattern, 43, (6, 2), dims=(16, 12), dtype=dtype, cp=4)
        assert wrong(p, strategy) == ""
        results = run(p, strategy).results
        kinds = {name: x.dtype for name, x in results.items()}
        lse = kinds.pop("lse")
        assert lse == torch.float32
        assert set(kinds.values()) == {tensors(p)[0].dtype}


@pytest.mark.parametrize("strategy", VARIANTS)
def test_rows_that_see_no_key_are_zero_with_lse_minus_infinity(strategy: str) -> None:
    p = ODD["rows that see no key"]
    results = run(p, strategy).results
    blind = p.seqlen_q - p.seqlen_kv
    assert blind == 10
    for name in ("out", "dq"):
        assert torch.equal(
            results[name][:, :, :blind], torch.zeros_like(results[name])[:, :, :blind]
        )
        assert results[name][:, :, blind:].abs().amax(dim=-1).min() > 0 or name == "dq"
    assert (results["lse"][:, :, :blind] == -torch.inf).all()
    assert results["lse"][:, :, blind:].isfinite().all()
    for name in ("dk", "dv"):
        assert results[name].isfinite().all()


@pytest.mark.parametrize("strategy", VARIANTS)
def test_keys_that_no_row_sees_have_no_gradient(strategy: str) -> None:
    p = ODD["keys that no row sees"]
    results = run(p, strategy).results
    for name in ("dk", "dv"):
        unseen = results[name][:, :, p.seqlen_q :]
        assert unseen.shape[2] == 18
        assert torch.equal(unseen, torch.zeros_like(unseen))


# Bytes, bits, inputs ------------------------------------------------------------------------------


def planned_bytes(plan: Plan) -> tuple[dict[int, int], dict[int, int]]:
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    for leg in (leg for task in plan.tasks for leg in legs_of(task)):
        if size := leg_bytes(plan, leg):
            sent[leg.src.rank] = sent.get(leg.src.rank, 0) + size
            received[leg.dst.rank] = received.get(leg.dst.rank, 0) + size
    return sent, received


@pytest.mark.parametrize("strategy", VARIANTS)
@pytest.mark.parametrize("dtype", [Dtype.FLOAT64, Dtype.BFLOAT16])
def test_each_rank_sends_and_receives_the_bytes_of_the_plan(strategy: str, dtype: Dtype) -> None:
    for pattern in ("causal", "window:left=3"):
        p = problem(pattern, 23, (6, 2), dims=(8, 5), dtype=dtype, cp=4)
        everything = run(p, strategy)
        assert everything.backward is not None
        found = (everything.forward.plan, everything.backward.plan)
        for plan, transport in zip(found, everything.transports, strict=True):
            sent, received = planned_bytes(plan)
            assert sum(sent.values()) > 0
            assert transport.traffic.sent_bytes == sent
            assert transport.traffic.received_bytes == received


class Talkative(LocalTransport):
    """Sends one message twice."""

    def send(self, buffer: Tensor, src: int, dst: int, tag: int) -> Handle:
        if not self.traffic.messages:
            super().send(buffer, src, dst, tag)
        return super().send(buffer, src, dst, tag)


def test_a_byte_that_the_plan_does_not_name_is_an_error() -> None:
    p = problem(cp=4)
    q, k, v, _ = tensors(p)
    run_all(p, "ring", q, k, v)
    with pytest.raises(PlanError, match=r"the bytes that move .* \(rank 0\)"):
        run_all(p, "ring", q, k, v, transport=Talkative)


@pytest.mark.parametrize("strategy", VARIANTS)
def test_results_repeat_bit_for_bit(strategy: str) -> None:
    p = problem("causal", 37, (6, 2), dims=(8, 8), dtype=Dtype.BFLOAT16, cp=4)
    first = run(p, strategy).results
    for _ in range(19):
        assert same_bits(first, run(p, strategy).results)


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
@pytest.mark.parametrize(("pattern", "cp"), [("causal", 2), ("causal", 3), ("strided", 2)])
def test_a_sum_in_the_precision_of_its_values_has_the_bits_of_a_wide_one(
    pattern: str, cp: int, strategy: str
) -> None:
    """What is rounded once may be rounded where it is added, and not when it is finished."""
    p = problem(pattern, 43, (6, 2), dims=(8, 5), batch=1, dtype=Dtype.BFLOAT16, cp=cp)
    both = programs(p, strategy)
    wide = [replace(program, narrow=frozenset()) for program in both]
    found = []
    for forward, backward in (both, wide):
        saved = execute(forward, forward_inputs(p, forward.plan), LocalTransport(p.cp)).results
        inputs = backward_inputs(p, backward.plan, saved)
        found.append(saved | execute(backward, inputs, LocalTransport(p.cp)).results)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][resident], found[1][resident]) for resident in found[0])


@pytest.mark.parametrize("strategy", VARIANTS)
def test_inputs_are_never_written(strategy: str) -> None:
    p = problem("causal", 23, (6, 2), dims=(8, 8), cp=4)
    forward, backward = programs(p, strategy)
    inputs = forward_inputs(p, forward.plan)
    before = {resident: tensor.clone() for resident, tensor in inputs.items()}
    saved = execute(forward, inputs, LocalTransport(p.cp)).results
    assert all(torch.equal(inputs[resident], before[resident]) for resident in before)
    inputs = backward_inputs(p, backward.plan, saved)
    before = {resident: tensor.clone() for resident, tensor in inputs.items()}
    execute(backward, inputs, LocalTransport(p.cp))
    assert all(torch.equal(inputs[resident], before[resident]) for resident in before)


@pytest.mark.parametrize("strategy", ["zigzag", "ulysses"])
def test_inputs_of_any_strides_give_the_same_bits(strategy: str) -> None:
    p = problem("causal", 23, (6, 2), cp=4)
    forward, _ = programs(p, strategy)
    inputs = forward_inputs(p, forward.plan)
    strided = {
        resident: x.transpose(1, 2).contiguous().transpose(1, 2) for resident, x in inputs.items()
    }
    assert not all(x.is_contiguous() for x in strided.values())
    expected = execute(forward, inputs, LocalTransport(p.cp)).results
    got = execute(forward, strided, LocalTransport(p.cp)).results
    assert all(torch.equal(expected[resident], got[resident]) for resident in expected)


def test_an_input_that_is_missing_or_unfit_is_named() -> None:
    p = problem("causal", 23, (6, 2), cp=4)
    forward, _ = programs(p, "ring")
    inputs = forward_inputs(p, forward.plan)
    gone = next(resident for resident in inputs if resident.place.rank == 2)
    rest = {resident: x for resident, x in inputs.items() if resident != gone}
    with pytest.raises(ValueError, match=r"no tensor for q\[2\]h0-5 of rank 2"):
        execute(forward, rest, LocalTransport(p.cp))
    for unfit in (inputs[gone][:, :, 1:], inputs[gone].float()):
        with pytest.raises(ValueError, match=r"q\[2\]h0-5 of rank 2 is .* the plan needs"):
            execute(forward, {**rest, gone: unfit}, LocalTransport(p.cp))


def test_spans_are_recorded_on_request_and_in_order() -> None:
    p = problem("causal", 23, (6, 2), cp=4)
    forward, _ = programs(p, "ring")
    inputs = forward_inputs(p, forward.plan)
    assert execute(forward, inputs, LocalTransport(p.cp)).spans == []
    spans = execute(forward, inputs, LocalTransport(p.cp), timed=True).spans
    assert {span.task for span in spans} == set(range(len(forward.plan.tasks)))
    assert {span.rank for span in spans} == set(range(p.cp))
    assert all(span.start_s <= span.end_s for span in spans)


def test_a_strategy_that_cannot_is_refused_before_anything_runs() -> None:
    p = problem("causal", 23, (6, 2), cp=7)
    q, k, v, _ = tensors(p)

    def never(cp: int) -> LocalTransport:
        raise AssertionError(cp)

    with pytest.raises(UnsupportedError, match=r"cp \(7\) must not exceed heads_q \(6\)"):
        run_all(p, "ulysses", q, k, v, transport=never)


# Mutants: each is a bug that somebody shipped; the tolerance has to see it ------------------------


def _attend_changed(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    real = kernels.attend_call

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        match change:
            case "mask":
                mask = _uncausal(mask)
            case "keys":
                k = k.flip(2)
            case "kv heads":
                k, v = k.roll(1, dims=1), v.roll(1, dims=1)
            case "scale":
                scale *= 1.1
        out, lse = real(q, k, v, mask, scale)
        match change:
            case "zero":
                out = torch.zeros_like(out)
            case "heads":
                out = out.roll(1, dims=1)
            case "lse is zero":
                lse = torch.zeros_like(lse)
            case "lse is base 2":
                lse = lse / torch.log(torch.tensor(2.0, dtype=lse.dtype))
            case "lse is bfloat16":
                lse = lse.bfloat16().to(lse.dtype)
            case "last row":
                out[:, :, -1] = 0.0
        return out, lse

    monkeypatch.setattr(kernels, "attend_call", attend)


def _uncausal(mask: Mask) -> Mask:
    return Mask(MaskKind.FULL, mask.q, mask.k) if mask.kind is MaskKind.CAUSAL else mask


def _backward_changed(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    real = kernels.attend_backward
    stale: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def attend_backward(*args: Tensor | Mask | float) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse, mask, scale = args
        match change:
            case "stale kv":
                k, v = stale.setdefault(tuple(k.shape), (k, v))
            case "mask":
                mask = _uncausal(mask)
            case "delta":
                out = torch.zeros_like(out)
        dq, dk, dv = real(dout, q, k, v, out, lse, mask, scale)
        match change:
            case "dk of 3 tokens":
                dk = torch.cat([dk[:, :, :3], torch.zeros_like(dk[:, :, 3:])], dim=2)
            case "dv twice":
                dv = 2 * dv
            case "bfloat16 dq":
                dq = dq.bfloat16().to(dq.dtype)
            case "dk and dv swapped":
                dk, dv = dv, dk
        return dq, dk, dv

    monkeypatch.setattr(kernels, "attend_backward", attend_backward)


MUTANTS = {
    "mask": {"out", "lse"},
    "keys": {"out"},
    "kv heads": {"out", "lse"},
    "scale": {"out", "lse"},
    "zero": {"out"},
    "heads": {"out"},
    "lse is zero": {"out", "lse"},
    "lse is base 2": {"out", "lse"},
    "lse is bfloat16": {"lse"},
    "last row": {"out"},
}
BACKWARD_MUTANTS = {
    "stale kv": {"dq", "dk"},
    "mask": {"dq", "dk", "dv"},
    "delta": {"dq", "dk"},
    "dk of 3 tokens": {"dk"},
    "dv twice": {"dv"},
    "dk and dv swapped": {"dk", "dv"},
}
PRECISIONS = [Dtype.FLOAT64, Dtype.FLOAT32, Dtype.BFLOAT16]


def failed(p: Problem, strategy: str) -> set[str]:
    return {verdict.name for verdict in failures(p, run(p, strategy).results)}


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("change", MUTANTS)
def test_a_forward_that_is_wrong_is_seen(
    change: str, dtype: Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem("causal", 37, (6, 2), dtype=dtype, cp=4)
    assert failed(p, "zigzag") == set()
    _attend_changed(monkeypatch, change)
    assert failed(p, "zigzag") >= MUTANTS[change]


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("change", BACKWARD_MUTANTS)
def test_a_backward_that_is_wrong_is_seen_in_the_gradients_alone(
    change: str, dtype: Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem("causal", 37, (6, 2), dtype=dtype, cp=4)
    assert failed(p, "zigzag") == set()
    _backward_changed(monkeypatch, change)
    found = failed(p, "zigzag")
    assert found >= BACKWARD_MUTANTS[change]
    assert found <= {"dq", "dk", "dv"}


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_a_merge_that_is_left_out_is_seen(dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem("causal", 37, (6, 2), dtype=dtype, cp=4)
    monkeypatch.setattr(kernels, "merge_", lambda *_: None)
    assert failed(p, "ring") >= {"out", "lse"}


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_a_merge_that_averages_is_seen(dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem("full", 37, (6, 2), dtype=dtype, cp=4)

    def average(out_acc: Tensor, lse_acc: Tensor, out: Tensor, lse: Tensor, into: Tensor) -> None:
        torch.lerp(out_acc, out.to(out_acc.dtype), 0.5, out=into)
        torch.logaddexp(lse_acc, lse, out=lse_acc)

    monkeypatch.setattr(kernels, "merge_", average)
    assert failed(p, "ring") == {"out", "dq", "dk"}


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_keys_of_two_ranks_that_are_swapped_are_seen(strategy: str, dtype: Dtype) -> None:
    p = problem("full", 48, (6, 2), dtype=dtype, cp=4)
    forward, _ = programs(p, strategy)
    inputs = forward_inputs(p, forward.plan)

    def out_of(given: dict[Resident, Tensor]) -> list[str]:
        results = execute(forward, given, LocalTransport(p.cp)).results
        ends = {resident: results[resident] for resident in forward.plan.outputs}
        whole = shards.collect(forward.plan, ends, Kind.OUT)
        return [verdict.name for verdict in failures(p, {"out": whole})]

    assert out_of(inputs) == []
    swapped = dict(inputs)
    first, second = (r for r in inputs if r.piece.tensor is Kind.V and r.place.rank in (1, 2))
    swapped[first], swapped[second] = inputs[second], inputs[first]
    assert out_of(swapped) == ["out"]


class Stale(LocalTransport):
    """Every receiver of keys after its first gets the first ones again."""

    def __init__(self, cp: int) -> None:
        super().__init__(cp)
        self._first: dict[tuple[int, torch.Size], Tensor] = {}

    def receive(self, buffer: Tensor, src: int, dst: int, tag: int) -> Handle:
        handle = super().receive(buffer, src, dst, tag)
        buffer.copy_(self._first.setdefault((dst, buffer.shape), buffer.clone()))
        return handle


@pytest.mark.parametrize("strategy", ["ring", "zigzag", "stripe", "double_ring:inner=2"])
def test_a_buffer_that_is_reused_too_early_is_seen(strategy: str) -> None:
    p = problem("full", 36, (6, 2), cp=4)
    q, k, v, dout = tensors(p)
    assert failures(p, run_all(p, strategy, q, k, v, dout=dout).results) == []
    results = run_all(p, strategy, q, k, v, dout=dout, transport=Stale).results
    assert {v.name for v in failures(p, results)} == {"out", "lse", "dq", "dk", "dv"}
