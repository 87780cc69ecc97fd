"""Open models by name, and models that a user describes."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path

from harness.base.numbers import positive, received, whole_number
from harness.training.configs import WINDOWS, model_of_config, windowed
from harness.training.models import Model
from patterns.outside import did_you_mean

_QWEN = "the norms of q and k cost nothing here"


MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        # Source: Llama 3 (arXiv:2407.21783, table 3); 8 030 261 248 parameters
        Model(
            name="llama3-8b",
            hidden=4096,
            layers=32,
            heads_q=32,
            heads_kv=8,
            head_dim=128,
            ffn=14336,
            vocab=128256,
            rotary=5e5,
        ),
        # Source: Llama 3 (arXiv:2407.21783, table 3); 70 553 706 496 parameters
        Model(
            name="llama3-70b",
            hidden=8192,
            layers=80,
            heads_q=64,
            heads_kv=8,
            head_dim=128,
            ffn=28672,
            vocab=128256,
            rotary=5e5,
        ),
        # Source: Llama 3 (arXiv:2407.21783, table 3); 405 853 388 800 parameters
        Model(
            name="llama3-405b",
            hidden=16384,
            layers=126,
            heads_q=128,
            heads_kv=8,
            head_dim=128,
            ffn=53248,
            vocab=128256,
            rotary=5e5,
        ),
        # Source: Llama 2 (arXiv:2307.09288, table 1), its model card for ffn and vocab
        Model(
            name="llama2-7b",
            hidden=4096,
            layers=32,
            heads_q=32,
            heads_kv=32,
            head_dim=128,
            ffn=11008,
            vocab=32000,
            rotary=1e4,
        ),
        # Source: Qwen 3 (arXiv:2505.09388, table 1), config.json of Qwen/Qwen3-8B for widths
        Model(
            name="qwen3-8b",
            hidden=4096,
            layers=36,
            heads_q=32,
            heads_kv=8,
            head_dim=128,
            ffn=12288,
            vocab=151936,
            rotary=1e6,
            note=_QWEN,
        ),
        # Source: Qwen 3 (arXiv:2505.09388, table 1), config.json of Qwen/Qwen3-14B for widths
        Model(
            name="qwen3-14b",
            hidden=5120,
            layers=40,
            heads_q=40,
            heads_kv=8,
            head_dim=128,
            ffn=17408,
            vocab=151936,
            rotary=1e6,
            note=_QWEN,
        ),
        # Source: Untied Ulysses (arXiv:2602.21196), released code: Llama blocks with Qwen3-32B's
        # dimensions and Llama 3's vocabulary, no norm of q and k; 32 519 623 680 parameters
        Model(
            name="qwen3-32b",
            hidden=5120,
            layers=64,
            heads_q=64,
            heads_kv=8,
            head_dim=128,
            ffn=25600,
            vocab=128256,
            rotary=1e6,
            note="with the vocabulary of Llama 3, as arXiv:2602.21196 trained it",
        ),
        # Source: Qwen 3 (arXiv:2505.09388, table 2), config.json of Qwen/Qwen3-30B-A3B
        Model(
            name="qwen3-30b-a3b",
            hidden=2048,
            layers=48,
            heads_q=32,
            heads_kv=4,
            head_dim=128,
            ffn=768,
            vocab=151936,
            rotary=1e6,
            experts=128,
            experts_used=8,
            note=_QWEN,
        ),
        # Source: Qwen 3 (arXiv:2505.09388, table 2), config.json of Qwen/Qwen3-235B-A22B
        Model(
            name="qwen3-235b-a22b",
            hidden=4096,
            layers=94,
            heads_q=64,
            heads_kv=4,
            head_dim=128,
            ffn=1536,
            vocab=151936,
            rotary=1e6,
            experts=128,
            experts_used=8,
            note=_QWEN,
        ),
        # Source: config.json of mistralai/Mistral-7B-v0.3
        Model(
            name="mistral-7b",
            hidden=4096,
            layers=32,
            heads_q=32,
            heads_kv=8,
            head_dim=128,
            ffn=14336,
            vocab=32768,
            rotary=1e6,
        ),
        # Source: Mistral 7B (arXiv:2310.06825, table 1): a window of 4096 in all layers
        Model(
            name="mistral-7b-v0.1",
            hidden=4096,
            layers=32,
            heads_q=32,
            heads_kv=8,
            head_dim=128,
            ffn=14336,
            vocab=32000,
            rotary=1e4,
            masks=windowed(4096, 32, 0),
            note=WINDOWS,
        ),
        # Source: config.json of mistralai/Mistral-Large-Instruct-2407; 123 billion parameters
        Model(
            name="mistral-large-2",
            hidden=12288,
            layers=88,
            heads_q=96,
            heads_kv=8,
            head_dim=128,
            ffn=28672,
            vocab=32768,
            rotary=1e6,
        ),
        # Source: Mixtral of Experts (arXiv:2401.04088, table 1), its config.json for the base
        Model(
            name="mixtral-8x7b",
            hidden=4096,
            layers=32,
            heads_q=32,
            heads_kv=8,
            head_dim=128,
            ffn=14336,
            vocab=32000,
            rotary=1e6,
            experts=8,
            experts_used=2,
        ),
        # Source: Gemma 2 (arXiv:2408.00118, table 1): every other layer has a window of 4096
        Model(
            name="gemma2-9b",
            hidden=3584,
            layers=42,
            heads_q=16,
            heads_kv=8,
            head_dim=256,
            ffn=14336,
            vocab=256128,
            rotary=1e4,
            tied=True,
            masks=windowed(4096, 21, 21),
            note=f"scores are capped, which costs nothing here; {WINDOWS}",
        ),
        # Source: Gemma 2 (arXiv:2408.00118, table 1): every other layer has a window of 4096
        Model(
            name="gemma2-27b",
            hidden=4608,
            layers=46,
            heads_q=32,
            heads_kv=16,
            head_dim=128,
            ffn=36864,
            vocab=256128,
            rotary=1e4,
            tied=True,
            masks=windowed(4096, 23, 23),
            note=f"scores are capped, which costs nothing here; {WINDOWS}",
        ),
        # Source: Gemma 3 (arXiv:2503.19786), config.json of google/gemma-3-12b-it
        Model(
            name="gemma3-12b",
            hidden=3840,
            layers=48,
            heads_q=16,
            heads_kv=8,
            head_dim=256,
            ffn=15360,
            vocab=262208,
            rotary=1e6,
            tied=True,
            masks=windowed(1024, 40, 8),
            note=f"its vision tower is left out; {WINDOWS}",
        ),
        # Source: Gemma 3 (arXiv:2503.19786), config.json of google/gemma-3-27b-it
        Model(
            name="gemma3-27b",
            hidden=5376,
            layers=62,
            heads_q=32,
            heads_kv=16,
            head_dim=128,
            ffn=21504,
            vocab=262208,
            rotary=1e6,
            tied=True,
            masks=windowed(1024, 52, 10),
            note=f"its vision tower is left out; {WINDOWS}",
        ),
        # Source: gpt-oss (arXiv:2508.10925): every other layer has a window of 128; its config.json
        Model(
            name="gpt-oss-120b",
            hidden=2880,
            layers=36,
            heads_q=64,
            heads_kv=8,
            head_dim=64,
            ffn=2880,
            vocab=201088,
            rotary=1.5e5,
            experts=128,
            experts_used=4,
            masks=windowed(128, 18, 18),
            note=f"sinks cost nothing here; {WINDOWS}",
        ),
        # Source: DeepSeek-V3 (arXiv:2412.19437, section 4.2): MLA, 128 heads of 128 + 64, v of 128
        Model(
            name="deepseek-v3",
            hidden=7168,
            layers=61,
            heads_q=128,
            heads_kv=128,
            head_dim=192,
            ffn=2048,
            vocab=129280,
            rotary=1e4,
            experts=256,
            experts_used=8,
            attention_only=True,
            note="latent attention is priced with all KV heads and v as wide as q and k; its "
            "projections, shared expert and 3 dense blocks are not modelled",
        ),
    )
}
"""The presets."""


def model(text: str) -> Model:
    """Return a preset by its name, a model of `key=value` pairs, or that of a configuration file.

    `llama3-8b`, `llama3-8b,layers=16`,
    `hidden=4096,layers=32,heads=32/8,head_dim=128,ffn=14336,vocab=128256,rotary=500000`, or
    `path/config.json` as Hugging Face publishes them.

    Raises:
        ValueError: Unknown name or key, or a key that lacks its value; the choices are listed. Or a
            file that is no such configuration.
    """
    if text.endswith(".json"):
        return model_of_config(Path(text))
    first, *pairs = text.split(",")
    if "=" in first:
        first, pairs = "", [first, *pairs]
    elif first not in MODELS:
        raise ValueError(
            f"model ({first}) is unknown{did_you_mean(first, MODELS)}; choose from "
            f"{', '.join(MODELS)}, name a config.json, or give all of {', '.join(_KEYS)} as "
            "key=value"
        )
    values: dict[str, float] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key == "heads":
            query, _, kv = value.partition("/")
            values |= {"heads_q": _number(key, query), "heads_kv": _number(key, kv or query)}
        elif key in _KEYS:
            values[key] = _number(key, value)
        else:
            raise ValueError(f"model ({text}): {key} is unknown; it takes {', '.join(_KEYS)}")
    names = [name for name in _FIELDS if name != "name"]
    if first:
        return _changed(MODELS[first], text, values)
    missing = [name for name in names if name not in values]
    if missing:
        raise ValueError(f"model ({text}) lacks {', '.join(missing)}; start it with a name instead")
    return Model(name=text, **values)  # type: ignore[arg-type]  # by field


def _changed(preset: Model, name: str, values: Mapping[str, float]) -> Model:
    """A preset with other values; where its layers are others, all have the mask of the most."""
    masks = preset.masks
    if "layers" in values and masks:
        most = max(masks, key=lambda mask: mask[1])[0]
        masks = ((most, int(values["layers"])),)
    return replace(preset, name=name, masks=masks, **values)  # type: ignore[arg-type]  # by field


_FIELDS = [field.name for field in fields(Model) if field.default is MISSING]
_KEYS = ("hidden", "layers", "heads", "head_dim", "ffn", "vocab", "rotary")


def _number(key: str, text: str) -> float:
    try:
        return positive(text) if key == "rotary" else whole_number(text)
    except ValueError as error:
        raise ValueError(f"model: {key} ({received(text)}) {error}") from None
