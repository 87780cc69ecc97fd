"""A model of a Hugging Face `config.json`: shapes, masks by layer, and what is not modelled."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.base.files import read_text
from harness.base.json_fields import parsed
from harness.training.models import Model

WINDOWS = "a window of N tokens in a published configuration counts the token itself: left=N-1 here"
_WHOLE = ("full_attention", "attention", "global", "*")
_WINDOWED = ("sliding_attention", "local", "sliding")
_NO_ATTENTION = ("-", "mlp")
_MAMBA = {"M": "mamba", "*": "attention", "-": "mlp"}
"""Signs of `hybrid_override_pattern`, as Nemotron-H has it."""

ConfigFields = Mapping[str, Any]


def windowed(size: int, local: int, whole: int) -> tuple[tuple[str, int], ...]:
    """Masks of layers with a window of so many tokens, the token itself among them, and without."""
    both = ((f"window:left={size - 1}", local), ("causal", whole))
    return tuple(mask for mask in both if mask[1])


def model_of_config(path: Path) -> Model:
    """Read a model's shapes.

    Args:
        path: A `config.json`.

    Raises:
        ValueError: It cannot be read, lacks a field, or no layer of it is attention.
    """
    try:
        values = parsed(read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"model ({path}) cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(  # noqa: TRY004  # of a file, not of an argument
            f"model ({path}) must be a JSON object, as Hugging Face publishes"
        )
    text = values.get("text_config")  # models that also see or hear
    outer, values = values, text if isinstance(text, dict) else values
    return _model(path, {**outer, **values}, nested=text is not None)


def _model(path: Path, values: ConfigFields, *, nested: bool) -> Model:
    layers = _number(path, values, "num_hidden_layers", "n_layer")
    heads = _number(path, values, "num_attention_heads", "n_head")
    hidden = _number(path, values, "hidden_size", "n_embd")
    latent = values.get("kv_lora_rank") is not None
    kinds = _kinds(values, layers)
    masks, others = _masks(path, values, kinds)
    experts = _optional(values, "num_experts", "num_local_experts", "n_routed_experts") or 1
    notes = [f"{sum(others.values())} of {layers} layers ({_said(others)}) are not modelled"]
    notes = notes if others else []
    if latent:
        notes.append("latent attention is priced with all KV heads and v as wide as q and k")
    if nested:
        notes.append("only its text model is modelled")
    if any(mask.startswith("window") for mask, _ in masks):
        notes.append(WINDOWS)
    width = _number(path, values, "intermediate_size", "moe_intermediate_size", "ffn_dim")
    if experts > 1:
        width = _optional(values, "moe_intermediate_size") or width
    return Model(
        name=str(path),
        hidden=hidden,
        layers=layers,
        heads_q=heads,
        heads_kv=heads if latent else _optional(values, "num_key_value_heads") or heads,
        head_dim=_head_dim(values, hidden // heads, latent=latent),
        ffn=width,
        vocab=_number(path, values, "vocab_size"),
        rotary=_rotary(values),
        experts=experts,
        experts_used=min(experts, _optional(values, "num_experts_per_tok") or 1),
        tied=bool(values.get("tie_word_embeddings", False)),
        attention_only=latent or bool(others),
        masks=masks,
        note="; ".join(notes),
    )


def _head_dim(values: ConfigFields, usual: int, *, latent: bool) -> int:
    if latent:
        return int(values.get("qk_nope_head_dim", 0)) + int(values.get("qk_rope_head_dim", 0))
    return _optional(values, "head_dim") or usual


def _rotary(values: ConfigFields) -> float:
    found = values.get("rope_theta")
    inner = values.get("rope_parameters")  # transformers 5
    if found is None and isinstance(inner, dict):
        found = inner.get("rope_theta") or inner.get("full_attention", {}).get("rope_theta")
    return float(found or 10000.0)  # Source: transformers, default of rope_theta


def _masks(
    path: Path, values: ConfigFields, kinds: Sequence[str]
) -> tuple[tuple[tuple[str, int], ...], Counter[str]]:
    """Masks of layers that attend, each with its layers; and the layers that do otherwise."""
    counts = Counter(kinds)
    local = sum(counts.pop(kind, 0) for kind in _WINDOWED)
    whole = sum(counts.pop(kind, 0) for kind in _WHOLE)
    for kind in _NO_ATTENTION:
        counts.pop(kind, 0)
    if local + whole == 0:
        raise ValueError(f"model ({path}): no layer of it is attention, but {_said(counts)}")
    size = _number(path, values, "sliding_window") if local else 1
    return windowed(size, local, whole), counts


def _kinds(values: ConfigFields, layers: int) -> list[str]:
    """The kind of each layer, in the words of configurations."""
    listed = values.get("layer_types") or values.get("layers_block_type")
    if isinstance(listed, list):
        return [str(kind) for kind in listed]
    if isinstance(signs := values.get("hybrid_override_pattern"), str):
        return [_MAMBA.get(sign, sign) for sign in signs]
    if every := _optional(values, "full_attention_interval"):  # Qwen3-Next
        return [_WHOLE[0] if (at + 1) % every == 0 else "linear_attention" for at in range(layers)]
    if every := _optional(values, "attn_layer_period"):  # Jamba
        offset = int(values.get("attn_layer_offset", 0))
        return [_WHOLE[0] if at % every == offset else "mamba" for at in range(layers)]
    return [_WINDOWED[0] if local else _WHOLE[0] for local in _windows(values, layers)]


def _windows(values: ConfigFields, layers: int) -> list[bool]:
    """Which layers have a window, where a configuration has no list of kinds."""
    if not values.get("sliding_window") or values.get("use_sliding_window") is False:
        return [False] * layers
    # Source: transformers, configuration_gemma2.py, _gemma3.py, _cohere2.py
    every = _optional(values, "sliding_window_pattern")
    if every is None and str(values.get("model_type", "")).startswith("gemma2"):
        every = 2
    if every is not None:
        return [(at + 1) % every != 0 for at in range(layers)]
    # Source: transformers, configuration_qwen2.py: layers from this one on have the window
    first = _optional(values, "max_window_layers") if "use_sliding_window" in values else None
    return [at >= (first or 0) for at in range(layers)]


def _said(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _optional(values: ConfigFields, *names: str) -> int | None:
    """The first of some fields that is a whole number from 1; None if there is none."""
    for name in names:
        value = values.get(name)
        if type(value) is int and value >= 1:
            return value
    return None


def _number(path: Path, values: ConfigFields, *names: str) -> int:
    found = _optional(values, *names)
    if found is None:
        raise ValueError(
            f"model ({path}): {names[0]} ({values.get(names[0])}) must be a whole number of at "
            "least 1, as a Hugging Face config.json has it"
        )
    return found
