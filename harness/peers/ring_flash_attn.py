"""ring-flash-attn: its functions, on the shards that its own tests and README give them."""

import sys
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from harness.peers.adapter import Attend, Local, kernels_for
from harness.plan.problem import Problem
from harness.plan.sharding import contiguous, stripe, zigzag
from harness.planning.peers import ChosenPeer

_PACKAGE = "ring_flash_attn"
_SHARDINGS = {"ring": contiguous, "zigzag": zigzag, "stripe": stripe, "llama3": contiguous}
_MODULES = {
    "ring": "ring_flash_attn",
    "zigzag": "zigzag_ring_flash_attn",
    "stripe": "stripe_flash_attn",
    "llama3": "llama3_flash_attn_varlen",
}
"""Its files; each names its function after itself."""
_HEADS_K_STRIDE = 1
"""KV heads per all-gather; its own tests take 1."""


def adapt(chosen: ChosenPeer, problem: Problem, rank: int, device: torch.device) -> Local:
    """Make a function of the package ready for one rank.

    Raises:
        ImportError, AttributeError: The package is not what this was written for.
    """
    function = chosen.peer.function
    module = _module(_MODULES[function], device.type)
    sharding = _SHARDINGS[function](problem.seqlen_q, problem.cp)
    positions = torch.tensor(sharding.positions(rank), dtype=torch.int64)
    causal = problem.pattern.text == "causal"
    if function == "llama3":
        return Local(positions, _packed(module, problem, rank, device, causal=causal))
    run = getattr(module, f"{_MODULES[function]}_func")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = run(q, k, v, causal=causal)
        return out

    return Local(positions, attend)


def _packed(
    module: ModuleType, problem: Problem, rank: int, device: torch.device, *, causal: bool
) -> Attend:
    """The form for packed sequences, of which there is one."""
    ends = torch.tensor([0, problem.seqlen_q], dtype=torch.int32, device=device)
    prepare = module.llama3_flash_attn_prepare_cu_seqlens
    cu_q, cu_k, max_q, max_k, local_k = prepare(
        ends, causal=causal, rank=rank, world_size=problem.cp
    )

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = module.llama3_flash_attn_varlen_func(
            q[0],
            k[0],
            v[0],
            cu_q,
            cu_k,
            max_q,
            max_k,
            heads_k_stride=_HEADS_K_STRIDE,
            local_k_slice=local_k,
            causal=causal,
        )
        return out[None]

    return attend


@lru_cache(maxsize=16)
def _module(name: str, device: str) -> ModuleType:
    """Import one file of the package, without its `__init__`, which asks for transformers."""
    if _PACKAGE not in sys.modules:
        spec = find_spec(_PACKAGE)
        if spec is None or spec.submodule_search_locations is None:
            raise ImportError(f"{_PACKAGE} is not installed")
        package = ModuleType(_PACKAGE)
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules[_PACKAGE] = package
    with kernels_for(torch.device(device)):
        return import_module(f"{_PACKAGE}.{name}")
