"""Models of configurations as Hugging Face publishes them: shapes, masks by layer, and notes."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UnsupportedError
from harness.training.models import Model
from harness.training.named_models import MODELS, model

SHAPES: dict[str, Any] = {
    "hidden_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 50,
}


def read(tmp_path: Path, **more: object) -> Model:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SHAPES, **more}))
    return model(str(path))


def test_shapes_are_those_of_the_file(tmp_path: Path) -> None:
    found = read(tmp_path, rope_theta=7e4)
    assert (found.hidden, found.layers, found.heads_q, found.heads_kv) == (96, 6, 8, 2)
    assert (found.head_dim, found.ffn, found.vocab, found.rotary) == (12, 40, 50, 7e4)
    assert found.patterns == (("causal", 6),)
    assert found.note == ""
    assert read(tmp_path, head_dim=20).head_dim == 20
    assert read(tmp_path, rope_parameters={"rope_theta": 3e5}).rotary == 3e5
    assert read(tmp_path, num_key_value_heads=None).heads_kv == 8


@pytest.mark.parametrize(
    ("more", "masks"),
    [
        ({"sliding_window": 33}, (("window:left=32", 6),)),
        ({"sliding_window": 33, "use_sliding_window": False}, (("causal", 6),)),
        (
            {"sliding_window": 33, "use_sliding_window": True, "max_window_layers": 2},
            (("window:left=32", 4), ("causal", 2)),
        ),
        (
            {"sliding_window": 33, "sliding_window_pattern": 3},
            (("window:left=32", 4), ("causal", 2)),
        ),
        (
            {"sliding_window": 33, "model_type": "gemma2"},
            (("window:left=32", 3), ("causal", 3)),
        ),
        (
            {"sliding_window": 9, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
            (("window:left=8", 5), ("causal", 1)),
        ),
    ],
)
def test_windows_count_the_token_itself(
    tmp_path: Path, more: dict[str, object], masks: tuple[tuple[str, int], ...]
) -> None:
    found = read(tmp_path, **more)
    assert found.patterns == masks
    windowed = masks[0][0].startswith("window")
    assert ("left=N-1" in found.note) is windowed


@pytest.mark.parametrize(
    ("more", "said", "attends"),
    [
        ({"full_attention_interval": 3}, "4 of 6 layers (4 linear_attention)", 2),
        ({"layer_types": ["linear_attention", "full_attention"] * 3}, "3 of 6 layers", 3),
        ({"hybrid_override_pattern": "M-M*-M"}, "3 of 6 layers (3 mamba)", 1),
        ({"attn_layer_period": 3, "attn_layer_offset": 1}, "4 of 6 layers (4 mamba)", 2),
    ],
)
def test_layers_that_are_not_modelled_are_named(
    tmp_path: Path, more: dict[str, object], said: str, attends: int
) -> None:
    found = read(tmp_path, **more)
    assert said in found.note
    assert found.patterns == (("causal", attends),)
    with pytest.raises(UnsupportedError, match="only its attention is modelled"):
        found.layer(2, 64)


def test_latent_attention_has_all_heads_and_its_own_width(tmp_path: Path) -> None:
    found = read(tmp_path, kv_lora_rank=5, qk_nope_head_dim=10, qk_rope_head_dim=6)
    assert (found.heads_kv, found.head_dim, found.attention_only) == (8, 16, True)


def test_experts_are_counted_and_those_used_are_fewer(tmp_path: Path) -> None:
    found = read(tmp_path, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    assert found.mlp_parameters == 3 * 96 * 16 * 4 + 96 * 4
    assert found.mlp_parameters_used == 3 * 96 * 16 * 2 + 96 * 4


def test_a_text_model_inside_another_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "seer", "text_config": SHAPES, "hidden_size": 7}))
    found = model(str(path))
    assert found.hidden == 96
    assert "only its text model" in found.note


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "must be a JSON object"),
        ("{", "Expecting"),
        ('{"hidden_size": 3}', "num_hidden_layers"),
        (json.dumps({**SHAPES, "layer_types": ["mamba"]}), "no layer of it is attention"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        model(str(path))
    with pytest.raises(ValueError, match="cannot be read"):
        model(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # Source: total_size of each model's index of weights, over 2 bytes a parameter; the norms
        # of q and k of Qwen 3 (2 x 128 a block) are not counted here.
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("qwen3-8b", 8_190_735_360 - 36 * 256),
        ("mistral-7b-v0.1", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_named_models_have_their_published_parameters(name: str, parameters: int) -> None:
    assert MODELS[name].parameters == parameters


def test_masks_of_named_models_cover_their_layers() -> None:
    for found in MODELS.values():
        assert sum(count for _, count in found.patterns) == found.layers
        assert ("left=N-1" in found.note) is any("window" in mask for mask, _ in found.patterns)


def test_other_layers_of_a_model_keep_the_mask_of_the_most() -> None:
    assert model("gemma3-27b,layers=3").patterns == (("window:left=1023", 3),)
    assert model("llama3-8b,layers=3").patterns == (("causal", 3),)
