"""The example: Hugging Face's models over ranks are what they are in one process."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from examples import hf_models
from examples.hf_models import CONFIGS, DEFAULT_ROPE, LLAMA_ROPE, compared, model_of
from harness.attention import ContextParallel, rotary_of
from harness.errors import UnsupportedError
from tests.support import ranks

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *((name, "zigzag") for name in CONFIGS),
        ("llama3", "fpdt:parts=3"),
        ("qwen2", "upipe:checkpoint=layer"),
    ],
)
def test_two_processes_find_what_one_does(name: str, strategy: str) -> None:
    for off, limit in ranks(2).run(compared, name, strategy):
        assert off <= limit < 1e-5


def lost(name: str, part: str) -> tuple[float, float]:
    """Compare a model whose attention over ranks forgets a part of itself."""
    original = hf_models.spread

    def without(model: nn.Module, cp: ContextParallel) -> None:
        original(model, cp)
        for block in model.model.layers:
            if part == "scaling":
                attention, known, rotary = block.self_attn.forward.args
                block.self_attn.forward = hf_models.partial(
                    hf_models.over_ranks, attention, known, replace(rotary, scaling=None)
                )
            else:
                getattr(block.self_attn, part).bias = None

    hf_models.spread = without
    try:
        found = hf_models.step(name, "ring", torch.float64)
    finally:
        hf_models.spread = original
    alone = hf_models.step(name, None, torch.float64)
    return found.loss, alone.loss


@pytest.mark.parametrize(("name", "part"), [("llama3", "scaling"), ("qwen2", "v_proj")])
def test_what_is_forgotten_is_seen_in_the_loss(name: str, part: str) -> None:
    found, alone = lost(name, part)
    assert abs(found - alone) > 1e-4 * alone


@pytest.mark.parametrize(
    "parameters",
    [LLAMA_ROPE, DEFAULT_ROPE, YARN, {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}],
    ids=lambda parameters: parameters["rope_type"],
)
def test_angles_are_those_of_the_models_own_rotary(parameters: dict[str, str | float]) -> None:
    """Theirs are float32: equal to its epsilon, relative to the largest angle."""
    config = model_of("llama3", torch.float64).config
    config.rope_parameters = dict(parameters)
    positions = torch.tensor([[0, 3, 11]])
    theirs = type(model_of("llama3", torch.float64).model.rotary_emb)(config)
    cos, sin = theirs(torch.zeros(1, dtype=torch.float64), positions)
    turns = rotary_of(parameters).turns(positions[0], config.head_dim, torch.device("cpu"))
    limit = 11 * torch.finfo(torch.float32).eps
    for ours, each in ((turns.cos, cos), (turns.sin, sin)):
        torch.testing.assert_close(torch.cat((ours, ours), -1), each[0], rtol=0, atol=limit)


def test_older_files_name_the_base_apart() -> None:
    old = {"type": "linear", "factor": 3.0}
    assert rotary_of(old, 1e4) == rotary_of({"rope_type": "linear", "rope_theta": 1e4, "factor": 3})


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {**DEFAULT_ROPE, "partial_rotary_factor": 0.5},
        {**YARN, "mscale": 0.7},
    ],
)
def test_what_is_not_known_is_refused_by_name(parameters: dict[str, str | float]) -> None:
    with pytest.raises(UnsupportedError, match="is not known here"):
        rotary_of(parameters)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "default"}, "rope_theta"),
        ({"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}, "low_freq_factor"),
    ],
)
def test_a_number_that_is_missing_is_named(
    parameters: dict[str, str | float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rotary_of(parameters)
