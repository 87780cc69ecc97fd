"""Claims that need no scale, confirmed by real processes on this machine.

What is counted in a plan, such as bytes and evenness, is counted by a proof of what the plan says.
Here ranks of few tokens send it: a run stops where the bytes that left a rank are not the plan's,
and its results are judged against the float64 oracle.
"""

from collections.abc import Iterable, Iterator

from harness.plan.problem import Direction, Dtype
from harness.records.config import Config, Where
from harness.reproduce.claims import Claim
from harness.reproduce.kinds import KINDS, Provenance

_CP, _TOKENS, _HEAD_DIM = 4, 264, 24
_SHARED, _OWN = (8, 4), (4, 4)
"""Query and KV heads where the claim's KV heads are shared, and where they are not."""
_MESHES = ("ulysses=", "rows=", "inner=")
"""Options that are right for the claim's degree only."""


def small_configs(claims: Iterable[Claim]) -> list[Config]:
    """Return a small cell for each strategy, pattern and direction that counted claims are of."""
    return list(dict.fromkeys(config for claim in claims for config in small_runs_of(claim)))


def small_runs_of(claim: Claim) -> Iterator[Config]:
    """Yield the small cells that confirm a claim: none where nothing of it is counted in a plan."""
    counted = claim.kind and KINDS[claim.kind].provenance is Provenance.COUNTED
    setting = claim.setting
    if not counted or "seqlen" not in setting:
        return
    query, kv = (str(setting["heads"]).split("/") * 2)[:2]
    heads_q, heads_kv = _OWN if query == kv else _SHARED
    for name in (setting.get("strategy"), setting.get("other")):
        if name is None or any(option in name for option in _MESHES):
            continue
        yield Config(
            strategy=name,
            pattern=setting.get("pattern", "causal"),
            cp=min(_CP, setting["cp"]),
            seqlen_q=_TOKENS,
            seqlen_kv=_TOKENS,
            heads_q=heads_q,
            heads_kv=heads_kv,
            head_dim=_HEAD_DIM,
            dtype=Dtype.FLOAT64,
            direction=Direction(setting.get("direction", Direction.FORWARD)),
            transport=Where.GLOO,
        )
