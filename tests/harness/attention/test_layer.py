"""A whole layer for a user's own model: right on every rank, with its gradients, or refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from harness.attention import attention_layer, context_parallel
from harness.errors import UnsupportedError
from harness.oracle.layer import layer_reference
from harness.oracle.reference import allowed_mask, inputs_of
from harness.oracle.tolerance import judge
from harness.plan.problem import Problem
from harness.plan.tasks import Tensor as Kind
from strategies import EVERY_STRATEGY, quick
from tests.support import layer_problem, ranks

OPTIONS = (
    "upipe:ring=2",
    "zigzag:checkpoint=layer",
    "ulysses:checkpoint=attention,offload=true",
    "ring:sum_gradients=true",
    "upipe:sum_gradients=true",
)
NAMES = ("w_q", "w_k", "w_v", "w_o")


def layer(seqlen: int = 37, pattern: str = "causal", rotary: float | None = 1e4) -> Problem:
    return layer_problem(pattern, seqlen, cp=1, rotary=rotary)


def weights_of(problem: Problem) -> list[Tensor]:
    """Of `torch.nn.Linear`'s shape; w_o leads back."""
    slabs = inputs_of(problem, 3)
    found = [slabs[kind].reshape(-1, problem.width) for kind in (Kind.W_Q, Kind.W_K, Kind.W_V)]
    return [*found, slabs[Kind.W_O].reshape(-1, problem.width).T]


def one_rank(problem: Problem, strategy: str) -> dict[str, Tensor]:
    """On a rank: y and dx of all tokens, and its share of the weights' gradients."""
    slabs = inputs_of(problem, 3)
    cp = context_parallel(
        strategy=strategy, pattern=problem.pattern, seqlen=problem.seqlen_q, heads_q=6, heads_kv=2
    )
    x, dy = (cp.shard(slabs[kind][:, 0], dim=1) for kind in (Kind.X, Kind.DY))
    # Neither is contiguous, as little as w_o is.
    x = x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    dy = dy.transpose(0, 1).contiguous().transpose(0, 1)
    weights = [weight.detach().requires_grad_() for weight in weights_of(problem)]
    y = attention_layer(cp, x, *weights, rotary=problem.rotary)
    dx, *grads = torch.autograd.grad(y, [x, *weights], dy)
    assert all(grad.shape == w.shape for grad, w in zip(grads, weights, strict=True))
    found = {"y": cp.unshard(y.detach(), dim=1)[:, None], "dx": cp.unshard(dx, dim=1)[:, None]}
    shares = [*grads[:3], grads[3].T]
    heads = (6, 2, 2, 6)
    for name, share, count in zip(NAMES, shares, heads, strict=True):
        found[f"d{name}"] = share.reshape(1, count, 1, -1)
    return found


def right(problem: Problem, found: list[dict[str, Tensor]]) -> list[str]:
    """What ranks found, weights' gradients added up, against the dense layer."""
    results = dict(found[0])
    for other in found[1:]:
        for name in ("y", "dx"):
            assert torch.equal(results[name], other[name])
        for name in NAMES:
            results[f"d{name}"] = results[f"d{name}"] + other[f"d{name}"]
    reference = layer_reference(problem, inputs_of(problem, 3), allowed_mask(problem.pattern))
    return [str(verdict) for verdict in judge(results, reference) if not verdict.passed]


@pytest.mark.parametrize("strategy", [*map(quick, EVERY_STRATEGY), *OPTIONS])
def test_a_layer_over_ranks_is_the_dense_one_with_all_gradients(strategy: str) -> None:
    problem = layer()
    assert right(problem, ranks(2).run(one_rank, problem, strategy)) == []


@pytest.mark.parametrize("strategy", ["zigzag", "upipe", "fpdt"])
def test_a_rank_without_tokens_adds_nothing(strategy: str) -> None:
    problem = layer(1, "full", rotary=None)
    assert right(problem, ranks(2).run(one_rank, problem, strategy)) == []


@pytest.mark.parametrize("strategy", ["stripe", "upipe", "fpdt:parts=3"])
def test_one_process_is_a_group_of_one(strategy: str) -> None:
    problem = layer(pattern="window:left=9,right=2")
    assert right(problem, [one_rank(problem, strategy)]) == []


# Refusals ---------------------------------------------------------------------------------------


def call(change: Callable[[list[Tensor]], None], strategy: str = "zigzag") -> Tensor:
    problem = layer()
    cp = context_parallel(strategy=strategy, seqlen=37, heads_q=6, heads_kv=2)
    given = [inputs_of(problem, 3)[Kind.X][:, 0], *weights_of(problem)]
    change(given)
    x, w_q, w_k, w_v, w_o = given
    return attention_layer(cp, x, w_q, w_k, w_v, w_o, rotary=1e4)


def exchanged(at: int, how: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor]], None]:
    def change(given: list[Tensor]) -> None:
        given[at] = how(given[at])

    return change


@pytest.mark.parametrize(
    ("at", "how", "message"),
    [
        (0, lambda x: x[:, :-1], "rank 0 of 1 has 37 tokens"),
        (0, lambda x: x[0], "three axes"),
        (1, lambda w: w[:-1], r"\(heads_q D, M\)"),
        (2, lambda w: w[:8], r"\(heads_kv D, M\)"),
        (4, lambda w: w.T, r"\(M, heads_q E\)"),
        (3, lambda w: w.float(), "dtype and device must be one"),
    ],
)
def test_what_does_not_fit_is_named(at: int, how: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(exchanged(at, how))


def test_there_is_no_attention_in_integers() -> None:
    def whole(given: list[Tensor]) -> None:
        given[:] = [each.long() for each in given]

    with pytest.raises(UnsupportedError, match="no attention in"):
        call(whole)


def test_a_gradient_of_the_gradient_is_refused() -> None:
    y = call(exchanged(0, lambda x: x.requires_grad_()))
    total = y.sum()
    with pytest.raises(UnsupportedError, match="no gradient of its own"):
        total.backward(create_graph=True)


def test_queries_and_keys_of_a_layer_are_the_same_tokens() -> None:
    with pytest.raises(UnsupportedError, match="same tokens"):
        context_parallel(strategy="upipe", seqlen=12, seqlen_kv=14, heads_q=6, pattern="full")


@pytest.mark.parametrize("strategy", ["upipe", "fpdt", "ring:offload=true"])
def test_attention_alone_is_refused_where_only_layers_are_planned(strategy: str) -> None:
    cp = context_parallel(strategy=strategy, seqlen=37, heads_q=6, heads_kv=2)
    shapes = ((3, 6, 37, 8), (3, 2, 37, 8), (3, 2, 37, 5))
    q, k, v = (torch.zeros(shape, dtype=torch.float64) for shape in shapes)
    with pytest.raises(UnsupportedError, match="whole layers"):
        cp.attend(q, k, v)


@pytest.mark.parametrize("rotary", [float("nan"), float("inf"), 1.0])
def test_a_base_of_rotary_angles_that_is_none_is_refused(rotary: float) -> None:
    with pytest.raises(ValueError, match="base above 1"):
        layer(rotary=rotary)
