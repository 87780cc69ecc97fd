"""Graph breaks for torch.compile: a call that runs a plan over ranks stands between two graphs."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_WHY = (
    "a run of a plan over ranks is no graph: compiled code breaks there and goes on behind it; "
    "compile without fullgraph=True, or the parts before and after attention each by itself"
)


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function as it is written where torch.compile traces its caller.

    The graph breaks before it and goes on after it; results are those without torch.compile. With
    `fullgraph=True` and under torch.export torch refuses it, with the reason.
    """

    @wraps(function)
    def plainly(*args: P.args, **kwargs: P.kwargs) -> T:
        found: T = torch.compiler.disable(function, reason=_WHY)(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch: no annotations
        return found

    # What `torch.compiler.disable` sets. Called here, at import, it would load the whole compiler
    # for everybody; without these marks tracing would stop one line later, and give no reason.
    plainly._torchdynamo_disable = True  # type: ignore[attr-defined]  # as torch does
    plainly._torchdynamo_disable_msg = _WHY  # type: ignore[attr-defined]  # as torch does

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return plainly(*args, **kwargs)
        return function(*args, **kwargs)

    return called
