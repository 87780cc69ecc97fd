"""Rotary positions as published configurations of models name them."""

from collections.abc import Callable, Mapping

from harness.errors import UnsupportedError
from harness.execute.rotary import (
    LinearScaling,
    Llama3Scaling,
    Pairs,
    Rotary,
    Scaling,
    YarnScaling,
)

_LINEAR = {"factor": "factor"}
_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_turns",
    "high_freq_factor": "high_turns",
    "original_max_position_embeddings": "original",
}
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original",
    "beta_fast": "fast",
    "beta_slow": "slow",
    "attention_factor": "growth",
}
_SCALINGS: Mapping[str, tuple[Callable[..., Scaling], Mapping[str, str]]] = {
    "linear": (LinearScaling, _LINEAR),
    "llama3": (Llama3Scaling, _LLAMA3),
    "yarn": (YarnScaling, _YARN),
}


def rotary_of(parameters: Mapping[str, object], base: float | None = None) -> Rotary:
    """Return how a model of Hugging Face turns q and k: halves, as its configuration says.

    Args:
        parameters: `config.rope_parameters`, or `rope_scaling` of older files.
        base: `rope_theta`, where `parameters` do not hold it.

    Raises:
        UnsupportedError: This way of scaling, or a number of it, is not known here.
        ValueError: A number is missing or wrong.

    Source: names in transformers 5.24.0, modeling_rope_utils.py.
    """
    given = {name: value for name, value in parameters.items() if value is not None}
    kind = given.pop("rope_type", given.pop("type", "default"))
    theta = given.pop("rope_theta", base)
    if not isinstance(theta, int | float):
        raise ValueError(  # noqa: TRY004  # callers' mistakes are ValueErrors
            f"rope_theta ({theta}) must be a number, such as 500000; give base"
        )
    if kind == "default" and not given:
        return Rotary(base=float(theta), pairs=Pairs.HALVES)
    make, names = _SCALINGS.get(str(kind), (None, {}))
    unknown = [name for name in given if name not in names]
    if make is None or unknown:
        named = f"{kind} with {', '.join(unknown)}" if unknown else kind
        raise UnsupportedError(
            f"rope_parameters: {named} is not known here",
            (*("default", *_SCALINGS), "q and k turned by the model, and ContextParallel.attend"),
        )
    try:
        scaling = make(**{names[name]: value for name, value in given.items()})
    except TypeError as error:
        wanted = ", ".join(names)
        raise ValueError(f"rope_parameters: {kind} takes {wanted}; got {given}") from error
    return Rotary(base=float(theta), pairs=Pairs.HALVES, scaling=scaling)
