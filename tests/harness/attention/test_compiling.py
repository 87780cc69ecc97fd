"""Under torch.compile: the same results, in one process and over ranks."""

import pytest
import torch
from torch import Tensor, nn

from harness.attention import attention, attention_layer, context_parallel
from tests.support import ranks

S, M = 23, 11


class Model(nn.Module):
    """Products around attention, so that there is something to compile on both sides."""

    def __init__(self, work: str) -> None:
        super().__init__()
        self.cp = context_parallel(strategy="zigzag", seqlen=S, heads_q=6, heads_kv=2)
        rng = torch.Generator().manual_seed(4)
        sizes = ((48, M), (16, M), (10, M), (M, 30))
        self.w = nn.ParameterList(
            torch.randn(size, generator=rng, dtype=torch.float64) for size in sizes
        )
        self.work = work

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin() * 2
        if self.work == "layer":
            return attention_layer(self.cp, x, *self.w, rotary=1e4).tanh()
        parts = [
            (x @ w.T).unflatten(-1, (heads, -1)).transpose(1, 2)
            for w, heads in zip(self.w, (6, 2, 2), strict=False)
        ]
        if self.work == "attend":
            out = self.cp.attend(parts[0], parts[1], parts[2])
        else:
            out = attention(parts[0], parts[1], parts[2], seqlen=S)
        return (out.transpose(1, 2).flatten(2) @ self.w[3].T).tanh()


def step(model: Model, compiled: bool, fullgraph: bool = False) -> list[Tensor]:
    """Y and all gradients."""
    rng = torch.Generator().manual_seed(6)
    whole = torch.randn(2, S, M, generator=rng, dtype=torch.float64)
    x = model.cp.shard(whole, dim=1).requires_grad_()
    run = torch.compile(model, backend="eager", fullgraph=fullgraph) if compiled else model
    y = run(x)
    wanted = [x, *list(model.w)[: None if model.work == "layer" else 4]]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), wanted)]


def compiled_and_not(work: str) -> list[bool]:
    model = Model(work)
    pairs = zip(step(model, compiled=True), step(model, compiled=False), strict=True)
    return [torch.equal(one, other) for one, other in pairs]


@pytest.mark.parametrize("work", ["attend", "layer", "function"])
def test_compiled_equals_uncompiled_over_ranks(work: str) -> None:
    """A plan that is new, then the same plan known."""
    for _ in range(2):
        assert ranks(2).run(compiled_and_not, work) == [[True] * 6] * 2


@pytest.mark.parametrize("work", ["attend", "layer"])
def test_one_graph_of_it_all_is_refused_with_the_reason(work: str) -> None:
    with pytest.raises(Exception, match="a run of a plan over ranks is no graph") as caught:
        step(Model(work), compiled=True, fullgraph=True)
    assert type(caught.value).__name__ == "Unsupported"
