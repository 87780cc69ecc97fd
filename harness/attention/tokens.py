"""The tokens of a sequence that is spread over ranks: which are here, to and from the whole."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from harness.attention.agreement import telling
from harness.attention.compiling import outside_graphs
from harness.attention.documents import within_documents
from harness.attention.gather import Sharers, gather_tokens, rank_positions
from harness.plan.sharding import Sharding
from harness.proved.plans import Owners
from patterns import Pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Who has which tokens, as a rank of the group sees it.

    Attributes:
        pattern: Which query positions attend which key positions; carries the lengths.
        rank: This rank in the group.
        queries: Who owns which query tokens.
        keys: Who owns which key tokens; equal to `queries` for self-attention.
        group: The process group; None = this process is alone.
    """

    pattern: Pattern
    rank: int
    queries: Sharding
    keys: Sharding
    group: dist.ProcessGroup | None = field(repr=False)
    _kept: dict[str, torch.Tensor] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    @property
    def owners(self) -> Owners:
        """Who owns which query tokens, and which key tokens."""
        return self.queries, self.keys

    @property
    def positions(self) -> torch.Tensor:
        """Positions of this rank's query tokens in the whole sequence, int64, in local order.

        Made once; not to be changed.
        """
        return self._made("queries", lambda: rank_positions(self.queries, self.rank))

    @property
    def key_positions(self) -> torch.Tensor:
        """As `positions`, for keys; the same for self-attention."""
        return self._made("keys", lambda: rank_positions(self.keys, self.rank))

    @property
    def document_positions(self) -> torch.Tensor:
        """As `positions`, but counted from the start of each packed document.

        Padding is counted from its own start; without documents they are `positions`.
        """
        return self._made("documents", lambda: within_documents(self.pattern, self.positions))

    def _made(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what was made before, unless somebody has changed it in place."""
        found = self._kept.get(name)
        if found is None or found._version:
            with torch.inference_mode(False):
                found = self._kept[name] = make()
        return found

    def sharding(self, *, keys: bool = False) -> Sharding:
        """Return who owns which query tokens, or key tokens."""
        return self.keys if keys else self.queries

    def shard(self, whole: torch.Tensor, *, dim: int = 2, keys: bool = False) -> torch.Tensor:
        """Take this rank's tokens out of a tensor that every rank has; gradients flow.

        Args:
            whole: Any tensor with all tokens along `dim`, in their original order.
            dim: The token axis: 2 for `(B, H, S, D)`, 1 for ids `(B, S)`.
            keys: Take key tokens, where they differ from query tokens.

        Raises:
            ValueError: The axis is not as long as the sequence.
        """
        sharding = self.sharding(keys=keys)
        total = sum(map(len, sharding.chunks))
        if whole.shape[dim] != total:
            raise ValueError(
                f"shard: axis {dim} of {tuple(whole.shape)} must hold the {total} tokens of the "
                "whole sequence; choose another dim"
            )
        positions = self.key_positions if keys else self.positions
        return whole.index_select(dim, positions.to(whole.device))

    @outside_graphs
    def unshard(self, part: torch.Tensor, *, dim: int = 2, keys: bool = False) -> torch.Tensor:
        """Gather every rank's tokens and put them back into their original order.

        A collective: every rank calls it, and its backward. The gradient of a token is the sum of
        those of all ranks, as each has a copy: where all ranks compute one and the same loss of the
        whole, that counts it cp times, so divide it by `cp`.

        Args:
            part: This rank's tokens along `dim`, in local order.
            dim: The token axis.
            keys: The tokens are key tokens, where they differ from query tokens.

        Raises:
            ValueError: The axis is not as long as this rank's part.
            PlanError: The ranks make different calls.
        """
        sharding = self.sharding(keys=keys)
        tokens = sharding.tokens(self.rank)
        with telling(self.group):
            if part.shape[dim] != tokens:
                raise ValueError(
                    f"unshard: axis {dim} of {tuple(part.shape)} must hold the {tokens} tokens of "
                    f"rank {self.rank}; choose another dim"
                )
        whole = gather_tokens(part.movedim(dim, 0), Sharers(sharding, self.rank, self.group))
        return whole.movedim(0, dim).contiguous()
