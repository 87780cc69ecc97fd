"""What trainings wrap around attention: checkpoints, hooks on saved tensors, DDP, FSDP2."""

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from harness.attention import ContextParallel, attention_layer, context_parallel
from tests.support import ranks

S, M, D, E = 23, 11, 8, 5
STRATEGIES = ("zigzag", "ulysses")
LAYERS = ("upipe", "fpdt:parts=2", "zigzag:checkpoint=layer", "ring:offload=true")


def made(strategy: str) -> ContextParallel:
    return context_parallel(strategy=strategy, seqlen=S, heads_q=6, heads_kv=2)


def weights() -> list[Tensor]:
    rng = torch.Generator().manual_seed(3)
    sizes = ((6 * D, M), (2 * D, M), (2 * E, M), (M, 6 * E))
    return [torch.randn(size, generator=rng, dtype=torch.float64) / 4 for size in sizes]


class Block(nn.Module):
    """Attention with its projections, by `attend` or by `attention_layer`, and a residual."""

    def __init__(self, strategy: str, whole: bool) -> None:
        super().__init__()
        self.cp, self.whole = made(strategy), whole
        self.w = nn.ParameterList(nn.Parameter(weight) for weight in weights())

    def forward(self, x: Tensor) -> Tensor:
        if self.whole:
            return x + attention_layer(self.cp, x, *self.w)
        parts = (
            (x @ w.T).unflatten(-1, (heads, -1)).transpose(1, 2)
            for w, heads in zip(self.w, (6, 2, 2), strict=False)
        )
        return x + self.cp.attend(*parts).transpose(1, 2).flatten(2) @ self.w[3].T


class Two(nn.Module):
    """Two blocks, each called through something."""

    def __init__(self, strategy: str, whole: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(strategy, whole) for _ in range(2))
        self.through: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.through(block, x)
        return x


def shard(model: Two) -> Tensor:
    rng = torch.Generator().manual_seed(5)
    x = torch.randn(2, S, M, generator=rng, dtype=torch.float64)
    return model.blocks[0].cp.shard(x, dim=1).requires_grad_()


def gradients(model: Two, call: nn.Module | None = None) -> list[Tensor]:
    """Of x and of every weight, after one step."""
    x = shard(model)
    (call or model)(x).square().sum().backward()
    assert x.grad is not None
    found = [x.grad]
    for parameter in model.parameters():
        assert parameter.grad is not None
        grad = parameter.grad
        found.append(grad.full_tensor() if isinstance(grad, DTensor) else grad)
    return found


def through_checkpoint(use_reentrant: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    def run(block: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(block, x, use_reentrant=use_reentrant)
        return y

    return run


def inside(context: Callable[[], AbstractContextManager[object]]) -> Callable[..., Tensor]:
    def run(block: nn.Module, x: Tensor) -> Tensor:
        with context():
            y: Tensor = block(x)
        return y

    return run


WRAPPERS: dict[str, Callable[..., Tensor]] = {
    "checkpoint": through_checkpoint(use_reentrant=False),
    "reentrant checkpoint": through_checkpoint(use_reentrant=True),
    "save_on_cpu": inside(save_on_cpu),
    "hooks": inside(lambda: saved_tensors_hooks(lambda x: (x.clone(),), lambda x: x[0])),
    "checkpoint with hooks": lambda block, x: inside(save_on_cpu)(
        lambda y: WRAPPERS["checkpoint"](block, y), x
    ),
    "nothing": inside(nullcontext),
}


def differing(strategy: str, whole: bool) -> list[str]:
    """The wrappers with which a gradient of this rank is another than without."""
    expected = gradients(Two(strategy, whole))
    found = []
    for name, through in WRAPPERS.items():
        model = Two(strategy, whole)
        model.through = through
        same = map(torch.equal, gradients(model), expected)
        found += [] if all(same) else [name]
    return found


def across_ranks(strategy: str, whole: bool, how: str) -> list[float]:
    """How far gradients under DDP or FSDP2 are from the mean of what the ranks add without."""
    expected = gradients(Two(strategy, whole))[1:]
    for grad in expected:
        torch.distributed.all_reduce(grad)
    model = Two(strategy, whole)
    if how == "ddp":
        found = gradients(model, DistributedDataParallel(model))
    else:
        model.through = (
            through_checkpoint(use_reentrant=False) if "checkpoint" in how else model.through
        )
        mesh = init_device_mesh("cpu", (2,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        found = gradients(model)
    return [
        float((grad - mean / 2).abs().max()) for grad, mean in zip(found[1:], expected, strict=True)
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_attend_may_be_checkpointed_and_what_it_saves_be_moved(strategy: str) -> None:
    assert ranks(2).run(differing, strategy, False) == [[], []]


@pytest.mark.parametrize("strategy", [*STRATEGIES, *LAYERS])
def test_a_layer_may_be_checkpointed_and_what_it_saves_be_moved(strategy: str) -> None:
    assert ranks(2).run(differing, strategy, True) == [[], []]


@pytest.mark.parametrize("how", ["ddp", "fsdp2", "fsdp2 and checkpoint"])
@pytest.mark.parametrize("whole", [False, True])
def test_weights_may_be_those_of_ddp_and_fsdp2(how: str, whole: bool) -> None:
    for off in ranks(2).run(across_ranks, "zigzag", whole, how):
        assert len(off) == 8
        assert max(off) < 1e-12


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_saved_may_come_back_laid_out_otherwise(strategy: str) -> None:
    cp = made(strategy)
    rng = torch.Generator().manual_seed(1)
    inputs = [
        torch.randn(2, heads, S, D, generator=rng, dtype=torch.float64).requires_grad_()
        for heads in (6, 2, 2)
    ]
    expected = torch.autograd.grad(cp.attend(*inputs).square().sum(), inputs)
    turned = saved_tensors_hooks(
        lambda x: x.transpose(0, -1).contiguous(), lambda x: x.transpose(0, -1)
    )
    with turned:
        out = cp.attend(*inputs)
    found = torch.autograd.grad(out.square().sum(), inputs)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("strategy", ["zigzag", "ulysses", "allgather"])
def test_a_step_leaves_nothing_behind(strategy: str) -> None:
    cp = made(strategy)
    inputs = [torch.randn(2, heads, S, D, requires_grad=True) for heads in (6, 2, 2)]
    gc.disable()
    try:
        out = cp.attend(*inputs)
        seen = weakref.ref(out)
        out.sum().backward()
        del out
        assert seen() is None
        unused = cp.attend(*inputs)
        seen = weakref.ref(unused)
        del unused
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("whole", [False, True])
def test_a_graph_that_is_retained_gives_its_gradients_again(whole: bool) -> None:
    model = Two("zigzag", whole)
    x = shard(model)
    y = model(x).square().sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
