"""Whole layers: the products, the dense oracle, the layer around every strategy, and its memory."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor as Values

from harness.check.cell import check, run_both, start
from harness.check.run import check_group
from harness.errors import MissedPairError, UnsupportedError
from harness.execute import projections
from harness.execute.interpreter import execute
from harness.execute.rotary import Rotary, Turns
from harness.execute.shards import collect, positions_of
from harness.execute.transport import LocalTransport
from harness.oracle import dense
from harness.oracle.inputs import make_layer_inputs
from harness.oracle.layer import layer_reference
from harness.oracle.reference import inputs_of
from harness.oracle.tolerance import errors
from harness.plan.dependencies import linked
from harness.plan.plan import Plan, to_json
from harness.plan.problem import Direction, Dtype
from harness.plan.reader import from_json
from harness.plan.tasks import Finish, Scope, Tensor
from harness.planning.layers.layer import WEIGHT_GRADS, with_summed_gradients
from harness.prepare.verified_plans import planned
from harness.verify.pair import check_pair
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import EVERY_STRATEGY, LAYER_STRATEGIES, STRATEGIES, quick, strategy
from tests.support import layer_config, layer_problem

every_strategy = pytest.mark.parametrize("name", [quick(name) for name in EVERY_STRATEGY])


def drawn(*shape: int, seed: int = 0) -> Values:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# Products -----------------------------------------------------------------------------------


def by_hand(x: Values, base: float, positions: list[int]) -> Values:
    """Rotary embedding pair by pair, from its definition."""
    turned = x.clone()
    for row, position in enumerate(positions):
        for pair in range(x.shape[3] // 2):
            angle = torch.tensor(position * base ** (-2 * pair / x.shape[3]), dtype=torch.float64)
            even, odd = x[:, :, row, 2 * pair], x[:, :, row, 2 * pair + 1]
            turned[:, :, row, 2 * pair] = even * angle.cos() - odd * angle.sin()
            turned[:, :, row, 2 * pair + 1] = even * angle.sin() + odd * angle.cos()
    return turned


def plainly(chunks: list[range], base: float) -> Turns:
    cpu = torch.device("cpu")
    return Rotary(base=base).turns(positions_of(chunks, cpu), 4, cpu)


def test_a_projection_is_turned_by_the_positions_of_its_chunks() -> None:
    x, weight = drawn(2, 1, 5, 7), drawn(1, 3, 1, 4 * 7, seed=1)
    chunks = [range(11, 20, 4), range(2, 4)]
    turns = plainly(chunks, 100.0)
    plain = torch.einsum("bsm,hdm->bhsd", x[:, 0], weight.reshape(3, 4, 7))
    expected = by_hand(plain, 100.0, [11, 15, 19, 2, 3])
    torch.testing.assert_close(
        projections.project_tensors(x, weight, turns), expected, rtol=0, atol=1e-13
    )
    torch.testing.assert_close(
        projections.project_tensors(x, weight, None), plain, rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("turned", [False, True])
def test_gradients_of_a_projection_are_those_of_autograd(turned: bool) -> None:
    x, weight = drawn(2, 1, 5, 7).requires_grad_(), drawn(1, 3, 1, 4 * 7, seed=1).requires_grad_()
    chunks = [range(3, 13, 2)]
    turns = plainly(chunks, 50.0) if turned else None
    plain = torch.einsum("bsm,hdm->bhsd", x[:, 0], weight.reshape(3, 4, 7))
    made = by_hand(plain, 50.0, list(chunks[0])) if turned else plain
    grad = drawn(2, 3, 5, 4, seed=2)
    dx, dw = torch.autograd.grad(made, (x, weight), grad)
    x, weight = x.detach(), weight.detach()
    torch.testing.assert_close(projections.to_model(grad, weight, turns), dx, rtol=0, atol=1e-13)
    found = projections.weight_gradient(grad, x, turns)
    torch.testing.assert_close(found, dw, rtol=0, atol=1e-13)


@pytest.mark.parametrize("rotary", [None, 300.0])
def test_the_dense_layer_has_the_gradients_of_autograd(rotary: float | None) -> None:
    shapes = {"w_q": (6, 4, 7), "w_k": (2, 4, 7), "w_v": (2, 3, 7), "w_o": (6, 3, 7)}
    w = {n: drawn(*s, seed=i).requires_grad_() for i, (n, s) in enumerate(shapes.items())}
    x, dy = drawn(2, 9, 7, seed=5).requires_grad_(), drawn(2, 9, 7, seed=6)
    allowed = torch.ones(9, 9, dtype=torch.bool).tril()
    q, k, v = (torch.einsum("bsm,hdm->bhsd", x, w[f"w_{n}"]) for n in "qkv")
    if rotary is not None:
        q, k = (by_hand(each, rotary, list(range(9))) for each in (q, k))
    k, v = (each.repeat_interleave(3, dim=1) for each in (k, v))
    scores = torch.where(allowed, q @ k.mT * 0.5, -torch.inf)
    y = torch.einsum("bhsd,hdm->bsm", scores.softmax(-1) @ v, w["w_o"])
    grads = torch.autograd.grad(y, (x, *w.values()), dy)
    plain = {name: each.detach() for name, each in w.items()}
    found = dense.layer(x.detach(), plain, allowed, 0.5, dy, rotary=rotary)
    torch.testing.assert_close(found["y"], y.detach(), rtol=0, atol=1e-12)
    for name, grad in zip(("dx", *(f"d{n}" for n in shapes)), grads, strict=True):
        torch.testing.assert_close(found[name], grad, rtol=0, atol=1e-12)


def test_rotary_asks_for_a_layer_pairs_and_a_base() -> None:
    for wrong, text in (
        ({"hidden": None}, "set hidden as well"),
        ({"head_dim": 7}, "try 8"),
        ({"rotary": 1.0}, "above 1"),
    ):
        with pytest.raises(ValueError, match=text):
            replace(layer_problem(), **wrong)


# The layer around every strategy ------------------------------------------------------------


@every_strategy
def test_the_layer_of_every_strategy_equals_the_dense_one(name: str) -> None:
    """y, dx and the weights' gradients; the bytes that moved; the memory that was held."""
    for cell in check(layer_config(name, cp=2 if name in LAYER_STRATEGIES else 3)):
        assert (cell.status, cell.reason) == ("passed", "")


@every_strategy
def test_the_layer_of_every_strategy_comes_back_from_json_and_joins_its_backward(name: str) -> None:
    forward, backward = (strategy(name).plan(layer_problem(), direction) for direction in Direction)
    check_pair(forward, backward)
    for plan in (forward, backward):
        assert from_json(to_json(plan)) == plan
        assert plan.scope is Scope.LAYER


@every_strategy
def test_a_layers_queries_and_keys_come_from_the_same_tokens(name: str) -> None:
    cross = replace(layer_problem(), pattern=make_pattern("full", 37, 41, cross=True))
    for direction in Direction:
        with pytest.raises(UnsupportedError, match="same tokens"):
            strategy(name).plan(cross, direction)


@pytest.mark.parametrize("name", [quick(name) for name in STRATEGIES])
def test_a_layer_moves_what_its_attention_moves(name: str) -> None:
    """Projections run where their tokens live, so nothing more crosses the network."""
    problem = layer_problem(cp=3)
    for direction in Direction:
        whole = strategy(name).plan(problem, direction)
        bare = strategy(name).plan(replace(problem, hidden=None, rotary=None), direction)
        kinds = tuple(type(task) for task in bare.tasks)
        inner = tuple(type(task) for task in whole.tasks)
        assert any(inner[at : at + len(kinds)] == kinds for at in range(len(inner)))


def test_processes_give_the_bits_of_the_local_run() -> None:
    cells = [layer_config(name, dtype=Dtype.FLOAT32) for name in ("zigzag", "upipe", "fpdt")]
    judged = list(check_group(cells, jobs=1))
    assert len(judged) == len(cells)
    for cell in (cell for pair in judged for cell in pair):
        assert (cell.status, cell.reason, cell.config.transport) == ("passed", "", "gloo")


# Gradients summed over ranks ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["zigzag", "ulysses", "upipe"])
def test_summed_gradients_of_weights_end_once_and_are_right(name: str) -> None:
    problem = layer_problem(cp=4 if name == "zigzag" else 2)
    plans = planned(problem, name)
    summed = verify(with_summed_gradients(plans.backward.plan))
    assert not {r.piece.tensor for r in summed.plan.outputs} & set(WEIGHT_GRADS)
    tensors = inputs_of(problem, 7)
    transport = LocalTransport(problem.cp)
    forward = run_both(plans, tensors, lambda: LocalTransport(problem.cp)).runs[Direction.FORWARD]
    inputs = start(summed.plan, tensors, forward.results, transport.ranks)
    run = execute(summed, inputs, transport)
    allowed = problem.pattern.allowed(*(torch.arange(37).numpy(),) * 2)
    reference = layer_reference(problem, tensors, torch.tensor(allowed))
    outputs = {resident: run.results[resident] for resident in summed.plan.outputs}
    found = {n: collect(summed.plan, outputs, Tensor(n)) for n in ("dw_q", "dw_k", "dw_v", "dw_o")}
    assert max(errors(found, reference).values()) < 1e-12


@every_strategy
def test_sums_of_gradients_are_an_option_of_every_strategy(name: str) -> None:
    """Right, with the bytes and memory of the plan, which ends with whole shares of heads."""
    text = f"{name}{',' if ':' in name else ':'}sum_gradients=true"
    for dtype in (Dtype.FLOAT64, Dtype.BFLOAT16):
        for cell in check(layer_config(text, cp=2 if name in LAYER_STRATEGIES else 3, dtype=dtype)):
            assert (cell.status, cell.reason) == ("passed", "")
    plan = strategy(text).plan(layer_problem(), Direction.BACKWARD)
    for tensor, heads in ((Tensor.DW_Q, 6), (Tensor.DW_V, 2)):
        shares = [(p.rank, piece.heads) for p, piece in plan.outputs if piece.tensor is tensor]
        assert sorted(rank for rank, _ in shares) == [0, 1]
        assert sum(share for _, share in shares) == (1 << heads) - 1
    assert strategy(text).plan(layer_problem(), Direction.FORWARD).saved


def test_a_sum_with_checkpoint_and_offload_is_right_and_the_same_in_processes() -> None:
    text = "upipe:checkpoint=layer,offload=true,sum_gradients=true"
    for cell in (cell for pair in check_group([layer_config(text)], jobs=1) for cell in pair):
        assert (cell.status, cell.reason, cell.config.transport) == ("passed", "", "gloo")


def test_a_sum_that_lacks_a_rank_is_caught() -> None:
    plan = with_summed_gradients(planned(layer_problem(), "zigzag").backward.plan)
    at = max(i for i, t in enumerate(plan.tasks) if not isinstance(t, Finish))
    with pytest.raises(MissedPairError, match="lacks token chunks"):
        verify(without(plan, at))


def without(plan: Plan, at: int) -> Plan:
    tasks = [task for index, task in enumerate(plan.tasks) if index != at]
    return replace(plan, tasks=linked(plan.initial, tasks))


# The account --------------------------------------------------------------------------------


@pytest.mark.parametrize("product", ["project_tensors", "to_model", "weight_gradient"])
def test_a_copy_that_a_product_keeps_is_seen_by_the_account(
    monkeypatch: pytest.MonkeyPatch, product: str
) -> None:
    original: Callable[..., Values] = getattr(projections, product)
    kept = []

    def wasteful(*args: Values) -> Values:
        made = original(*args)
        kept.append(made.clone())
        return made

    monkeypatch.setattr(projections, product, wasteful)
    cells = check(replace(layer_config("zigzag"), hidden=401))  # so wide that products are the peak
    assert any("the ledger says" in cell.reason for cell in cells)


def test_layer_inputs_are_the_same_in_every_precision() -> None:
    wide, narrow = (
        make_layer_inputs(replace(layer_problem(), dtype=dtype), 3)
        for dtype in (Dtype.FLOAT64, Dtype.BFLOAT16)
    )
    for tensor, values in wide.items():
        assert torch.equal(values.bfloat16(), narrow[tensor])
