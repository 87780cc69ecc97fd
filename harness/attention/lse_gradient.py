"""The gradient of lse, carried through a backward plan as columns of tensors that it moves anyway.

With `p` the weights, a score's gradient is `p * (dout . v - rowsum(dout * out) + dlse)`. Kernels
know dout, v and out. So out gets columns of constants, dout the negative of dlse over them, and v
zeros: the row sum becomes `rowsum(dout * out) - dlse`, `dout . v` stays, and what dv gets in these
columns is dropped. Every strategy moves dout to where its rows are computed, so no plan changes but
for the width of its tensors.
"""

import torch
from torch.nn.functional import pad

from harness.plan.problem import Dtype
from harness.plan.tasks import Tensor

_CONSTANTS = {8: (1.0,), 4: (1.0,), 2: (2.0**15, 2.0**4, 2.0**-7)}
"""Per bytes of an element. Two bytes hold dlse in three columns: 24 bits, and up to 2**31, though
float16 ends at 65504."""


def dlse_columns(dtype: Dtype) -> int:
    """Return how many columns the gradient of lse takes."""
    return len(_CONSTANTS[dtype.bytes])


def widened(tensor: Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return what a forward plan saved with the columns that the backward plan needs."""
    constants = _CONSTANTS[x.element_size()]
    if tensor is Tensor.V:
        return pad(x, (0, len(constants)))
    if tensor is Tensor.OUT:
        return torch.cat([x, x.new_tensor(constants).expand(*x.shape[:-1], -1)], dim=-1)
    return x


def with_dlse(dout: torch.Tensor, dlse: torch.Tensor) -> torch.Tensor:
    """Return the gradient of out, `(B, H, S, E)`, with the columns of dlse, `(B, H, S)`."""
    rest, found, most = -dlse, [dout], torch.finfo(dout.dtype).max
    for constant in _CONSTANTS[dout.element_size()]:
        column = (rest / constant).clamp(-most, most).to(dout.dtype)
        rest = rest - column.to(rest.dtype) * constant
        found.append(column[..., None])
    return torch.cat(found, dim=-1)
