"""Batches of more than one sequence: rows are never mixed."""

import pytest
import torch

from harness.attention import run_all
from tests.support import EVERY_STRATEGY, problem, tensors, wrong


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
@pytest.mark.parametrize("batch", [2, 3])
def test_b022_a_row_of_a_batch_is_what_it_is_alone(batch: int, strategy: str) -> None:
    p = problem("causal", 13, (4, 2), batch=batch, cp=2)
    alone = problem("causal", 13, (4, 2), batch=1, cp=2)
    q, k, v, dout = tensors(p)
    together = run_all(p, strategy, q, k, v, dout=dout).results
    for row in range(batch):
        part = [x[row : row + 1] for x in (q, k, v, dout)]
        single = run_all(alone, strategy, *part[:3], dout=part[3]).results
        for name, x in single.items():
            torch.testing.assert_close(together[name][row : row + 1], x, rtol=0, atol=1e-13)
    assert wrong(p, strategy) == ""


def test_b022_a_turn_to_heads_and_back_is_the_identity() -> None:
    p = problem("window:left=0,right=0", 2, (4, 4), dims=(1, 1), batch=2, cp=2)
    values = torch.arange(16, dtype=torch.float64).reshape(2, 4, 2, 1)
    results = run_all(p, "ulysses", values, values, values, dout=values).results
    assert torch.equal(results["out"], values)  # each token sees itself, so out is v
    assert torch.equal(results["dv"], values)
