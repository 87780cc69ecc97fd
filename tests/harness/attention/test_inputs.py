"""What trainings hand over: numbers of any kind, meshes, pickles; the rest is refused at once."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from harness.attention import ContextParallel, attention, attention_layer, context_parallel
from harness.errors import UnsupportedError
from tests.support import ranks

S = 23


def made(**others: Any) -> ContextParallel:  # noqa: ANN401  # whatever a user may pass
    return context_parallel(**{"seqlen": S, "heads_q": 6, "heads_kv": 2, **others})


def inputs(cp: ContextParallel) -> list[Tensor]:
    rng = torch.Generator().manual_seed(1)
    whole = (torch.randn(2, heads, S, 8, generator=rng, dtype=torch.float64) for heads in (6, 2, 2))
    return [cp.shard(x).requires_grad_() for x in whole]


def gradient(cp: ContextParallel) -> Tensor:
    q, k, v = inputs(cp)
    cp.attend(q, k, v).square().sum().backward()
    assert q.grad is not None
    return q.grad


# Numbers ------------------------------------------------------------------------------------------

NUMBERS: tuple[Callable[[int], Any], ...] = (int, np.int64, np.int32, torch.tensor)


def of_each_kind() -> list[bool]:
    """Whether whole numbers of each kind do as Python's."""
    expected = gradient(made())
    found = []
    for kind in NUMBERS:
        cp = made(seqlen=kind(S), heads_q=kind(6), heads_kv=kind(2), seqlen_kv=kind(S))
        assert (type(cp.heads_q), type(cp.pattern.seqlen_q)) == (int, int)
        x = torch.ones(2, cp.queries.tokens(cp.rank), 11)
        weights = [torch.ones(size) for size in ((48, 11), (16, 11), (16, 11), (11, 48))]
        attention_layer(cp, x, *weights, rotary=np.float32(1e4))
        found.append(torch.equal(gradient(cp), expected))
    return found


def test_whole_numbers_of_any_kind_are_taken() -> None:
    assert ranks(2).run(of_each_kind) == [[True] * len(NUMBERS)] * 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seqlen": "4k"}, r"seqlen \('4k'\) must be a whole number, such as 4096"),
        ({"seqlen": 4096.0}, r"seqlen \(4096\.0\) must be a whole number"),
        ({"seqlen": None}, r"seqlen \(None\) must be a whole number"),
        ({"seqlen_kv": "4k"}, r"seqlen_kv \('4k'\) must be a whole number"),
        ({"heads_q": 6.0}, r"heads_q \(6\.0\) must be a whole number"),
        ({"heads_kv": torch.tensor(2.0)}, r"heads_kv \(tensor\(2\.\)\) must be a whole number"),
        ({"strategy": None}, r"strategy \(None\) must be a name: one of ring, .*zigzag"),
        ({"pattern": None}, r"pattern \(None\) must be a name: one of full, causal"),
        ({"group": [0, 1]}, r"group \(\[0, 1\]\) must be a process group, .*mesh\[\"cp\"\]"),
        ({"group": "cp"}, r"group \('cp'\) must be a process group"),
    ],
)
def test_what_is_none_is_refused_where_it_is_given(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(**given)


# Groups -------------------------------------------------------------------------------------------


def in_meshes() -> tuple[bool, bool, str]:
    """A mesh of one axis, one axis of a mesh, a mesh of two axes."""
    expected = gradient(made())
    one = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    same = [torch.equal(gradient(made(group=mesh)), expected) for mesh in (one, two["cp"])]
    try:
        made(group=two)
    except ValueError as error:
        return same[0], same[1], str(error)
    return same[0], same[1], "not noticed"


def test_a_mesh_of_one_axis_is_a_group() -> None:
    for one, axis, told in ranks(2).run(in_meshes):
        assert one
        assert axis
        assert "the axes ('dp', 'cp'), and must have one; give one of them, as mesh[\"cp\"]" in told


# Tensors ------------------------------------------------------------------------------------------


def with_dtensors() -> list[str]:
    cp, mesh = made(), init_device_mesh("cpu", (2,))
    q, k, v = inputs(cp)
    x = torch.ones(2, cp.queries.tokens(cp.rank), 11)
    weights = [torch.ones(size) for size in ((48, 11), (16, 11), (16, 11), (11, 48))]
    weights[1] = DTensor.from_local(weights[1], mesh, [Shard(0)])
    told = []
    calls: tuple[Callable[[], Tensor], ...] = (
        lambda: cp.attend(DTensor.from_local(q, mesh, [Shard(2)]), k, v),
        lambda: attention_layer(cp, x, *weights),
    )
    for call in calls:
        try:
            call()
        except ValueError as error:
            told.append(str(error))
    return told


def test_tensors_that_torch_spreads_are_refused_with_the_way_out() -> None:
    for told in ranks(2).run(with_dtensors):
        first, second = told
        assert "attention: q is a DTensor" in first
        assert "q.to_local()" in first
        assert "attention_layer: w_k is a DTensor" in second


def test_transforms_of_functions_are_refused() -> None:
    cp = made()
    q, k, v = (x.detach() for x in inputs(cp))
    with pytest.raises(UnsupportedError, match=r"torch\.func .* try torch\.autograd\.grad"):
        torch.func.grad(lambda x: cp.attend(x, k, v).sum())(q)
    with pytest.raises(UnsupportedError, match=r"attention: torch\.func .* a loop"):
        torch.func.vmap(lambda x: attention(x, k, v))(q[None])
    weights = [torch.ones(size) for size in ((48, 11), (16, 11), (16, 11), (11, 48))]
    with pytest.raises(UnsupportedError, match=r"attention_layer: torch\.func"):
        torch.func.grad(lambda x: attention_layer(cp, x, *weights).sum())(torch.ones(2, S, 11))


def test_what_is_no_tensor_and_what_does_not_agree_is_named() -> None:
    cp = made()
    q, k, v = inputs(cp)
    with pytest.raises(ValueError, match=r"attention: k \(ndarray\) must be a tensor"):
        cp.attend(q, k.detach().numpy(), v)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(ValueError, match=r"attention: v \(NoneType\) must be a tensor"):
        attention(q, k, None)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(ValueError, match=r"v is laid out as torch\.sparse_coo; give a dense"):
        cp.attend(q, k, v.detach().to_sparse())
    with pytest.raises(ValueError, match=r"one; cast with \.to\(\.\.\.\), or call under torch\.au"):
        cp.attend(q.bfloat16(), k, v)
    weights = [torch.ones(size) for size in ((48, 11), (16, 11), (16, 11), (11, 48))]
    x = torch.ones(2, S, 11)
    with pytest.raises(ValueError, match=r"x .* bfloat16 .* or call under torch\.autocast"):
        attention_layer(cp, x.bfloat16(), *weights)
    linear = nn.Linear(11, 48, bias=False)
    with pytest.raises(ValueError, match=r"w_q \(Linear\) must be a tensor; give w_q\.weight"):
        attention_layer(cp, x, linear, *weights[1:])  # type: ignore[arg-type]  # the mistake


# Copies -------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """A module of a user that holds the value."""

    def __init__(self, cp: ContextParallel) -> None:
        super().__init__()
        self.cp, self.inner = cp, nn.Linear(3, 2)


def copies_of(module: Holder) -> list[Holder]:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return [
        copy.copy(module),
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(file, weights_only=False),
    ]


def copied() -> tuple[bool, str]:
    """Copies of a module do as it does; one of a group of its own cannot be pickled."""
    module = Holder(made(strategy="usp:2x1", pattern="window:left=5"))
    expected = gradient(module.cp)
    same = all(torch.equal(gradient(each.cp), expected) for each in copies_of(module))
    other = Holder(made(group=dist.new_group([0, 1])))
    assert copy.deepcopy(other).cp.group is other.cp.group
    try:
        pickle.dumps(other)
    except UnsupportedError as error:
        return same, str(error)
    return same, "not noticed"


def test_a_module_that_holds_it_can_be_copied_and_saved() -> None:
    for same, told in ranks(2).run(copied):
        assert same
        assert "its group is that of ranks [0, 1]" in told
        assert "state_dict()" in told


def test_what_a_group_saved_can_be_loaded_alone() -> None:
    saved = ranks(2).run(saved_in_a_group)[1]
    cp = pickle.loads(saved)
    assert (cp.cp, cp.rank, cp.strategy.text) == (1, 0, "stripe")
    assert torch.equal(gradient(cp), gradient(made(strategy="stripe")))


def saved_in_a_group() -> bytes:
    return pickle.dumps(made(strategy="stripe"))
