"""Run Llama 3, Qwen 2 and Qwen 3 as they are over ranks, and see that nothing changes.

    .venv/bin/torchrun --nproc-per-node 2 examples/hf_models.py
    .venv/bin/torchrun --nproc-per-node 4 examples/hf_models.py --models qwen2 \
        --strategies zigzag upipe:checkpoint=layer

The models are Hugging Face's own (`pip install transformers`), tiny and with random weights; only
the `forward` of their attention is exchanged. Llama 3 has scaled rotary positions, Qwen 2 biases of
q, k and v, Qwen 3 norms of the heads of q and k. Each sequence is packed: documents one behind the
other, whose positions begin anew and which do not attend one another.

One process with the model untouched says what loss and gradients must be. Its norms and rotary
angles are float32 in every dtype. So ranks compute in float64 and may be as far from it, times the
factor of `harness.oracle.tolerance` for gradients, as the untouched model in float32 is.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from harness.attention import ContextParallel, Rotary, attention_layer, context_parallel, rotary_of

LENGTHS = (19, 1, 33)
SEQLEN = sum(LENGTHS)
BATCH = 2
VOCABULARY = 61
FACTOR = 3.0
"""Of the twin's error, for gradients: see harness/oracle/tolerance.py."""

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 256,
    "use_cache": False,
}
LLAMA_ROPE = {  # Llama 3.1's, but for `original_max_position_embeddings`, which is 8192 there
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e6}
CONFIGS: Mapping[str, tuple[type[PreTrainedConfig], Mapping[str, str | float]]] = {
    "llama3": (LlamaConfig, LLAMA_ROPE),
    "qwen2": (Qwen2Config, DEFAULT_ROPE),
    "qwen3": (Qwen3Config, DEFAULT_ROPE),
}


class Found(NamedTuple):
    """The loss of one step, and every parameter's gradient by name."""

    loss: float
    gradients: dict[str, Tensor]


def model_of(name: str, dtype: torch.dtype) -> nn.Module:
    """A tiny model whose every parameter is random: biases and norms as well."""
    config, rope = CONFIGS[name]
    made = config(**_SIZES, rope_parameters=dict(rope))
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").to(dtype)
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float32)
            parameter.copy_(noise * 0.3 + (1 if parameter.dim() == 1 else 0))
    return model


def packed() -> tuple[Tensor, Tensor, Tensor]:
    """Ids, the ids that follow them, and positions in documents, each `(B, S)`."""
    draw = torch.Generator().manual_seed(1)
    whole = torch.randint(VOCABULARY, (BATCH, SEQLEN + 1), generator=draw)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).expand(BATCH, SEQLEN)
    return whole[:, :-1], whole[:, 1:], positions


def spread(model: nn.Module, cp: ContextParallel) -> None:
    """Exchange what the model's attention does: over the ranks of `cp`, from its own weights."""
    # An implementation without masks: the pattern says who attends whom.
    AttentionInterface.register("over_ranks", over_ranks)
    model.config._attn_implementation = "over_ranks"
    rotary = rotary_of(model.config.rope_parameters)
    for block in model.model.layers:
        block.self_attn.forward = partial(over_ranks, block.self_attn, cp, rotary)


def over_ranks(
    attention: nn.Module,
    cp: ContextParallel,
    rotary: Rotary,
    hidden_states: Tensor,
    position_ids: Tensor,
    **_: object,
) -> tuple[Tensor, None]:
    """What `forward` of LlamaAttention, Qwen2Attention and Qwen3Attention comes to."""
    q, k, v, o = (getattr(attention, f"{name}_proj") for name in "qkvo")
    norm_q, norm_k = (getattr(attention, f"{name}_norm", None) for name in "qk")
    y = attention_layer(
        cp,
        hidden_states,
        q.weight,
        k.weight,
        v.weight,
        o.weight,
        b_q=q.bias,
        b_k=k.bias,
        b_v=v.bias,
        b_o=o.bias,
        norm_q=None if norm_q is None else norm_q.weight,
        norm_k=None if norm_k is None else norm_k.weight,
        norm_eps=attention.config.rms_norm_eps,
        rotary=rotary,
        positions=position_ids,
    )
    return y, None


def step(name: str, strategy: str | None, dtype: torch.dtype) -> Found:
    """Run a model forward and backward, once.

    Args:
        name: Of `CONFIGS`.
        strategy: Over the ranks of the default group; None = in this process alone, untouched.
        dtype: Of weights and activations.
    """
    model, cp = model_of(name, dtype), None
    ids, following, positions = packed()
    if strategy is not None:
        cp = context_parallel(
            strategy=strategy,
            pattern=f"documents:lengths={'+'.join(map(str, LENGTHS))}",
            seqlen=SEQLEN,
            heads_q=model.config.num_attention_heads,
            heads_kv=model.config.num_key_value_heads,
        )
        spread(model, cp)
        # The next token of each token is known before tokens are dealt to ranks.
        ids, following, positions = (cp.shard(each, dim=1) for each in (ids, following, positions))
    scores = model(input_ids=ids, position_ids=positions, use_cache=False).logits.flatten(0, 1)
    total = nn.functional.cross_entropy(scores, following.flatten(), reduction="sum")
    loss = total / (BATCH * SEQLEN)  # the mean over all tokens, so that ranks with more weigh more
    loss.backward()
    value = loss.detach()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    if cp is not None and cp.group is not None:
        for each in (value, *gradients.values()):
            dist.all_reduce(each)
    return Found(float(value), gradients)


def furthest(found: Found, alone: Found) -> float:
    """The largest difference of the loss and of each gradient, relative to the gradient's size."""
    assert found.gradients.keys() == alone.gradients.keys()
    far = [
        float((found.gradients[name] - right).abs().max() / right.abs().max())
        for name, right in alone.gradients.items()
    ]
    return max(abs(found.loss - alone.loss) / alone.loss, *far)


def compared(name: str, strategy: str) -> tuple[float, float]:
    """How far ranks are from one process, and how far they may be."""
    alone = step(name, None, torch.float64)
    limit = FACTOR * furthest(step(name, None, torch.float32), alone)
    return furthest(step(name, strategy, torch.float64), alone), limit


def main() -> int:
    """Compare each model under each strategy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=[*CONFIGS], default=[*CONFIGS])
    parser.add_argument("--strategies", nargs="+", default=["zigzag", "ulysses"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, failed = (dist.get_rank() if dist.is_initialized() else 0), 0
    for name in args.models:
        for strategy in args.strategies:
            off, limit = compared(name, strategy)
            failed += not off <= limit
            if rank == 0:
                print(f"{name:8} {strategy:24} off by {off:.1e}, at most {limit:.1e} is right")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
