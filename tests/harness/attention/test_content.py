"""What a pattern allows is what counts, not how it is spelled: files change, anybody makes one."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.attention import context_parallel
from harness.errors import PlanError, UnsupportedError
from harness.oracle.tolerance import calibrate, judge
from harness.plan.plan import to_json
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.reader import from_json
from harness.planning.peers import peer, refuse
from patterns import Pattern, make_pattern
from strategies import strategy
from tests.support import ranks, tensors

S = 23
DENSE = "111\n111\n011\n"
SPARSE = "120\n101\n112\n"


def problem_of(pattern: Pattern) -> Problem:
    return Problem(
        pattern=pattern, heads_q=6, heads_kv=2, head_dim=8, batch=2, dtype=Dtype.FLOAT64, cp=1
    )


def wrong(pattern: Pattern, mask: Tensor, name: str = "zigzag") -> list[str]:
    """Attend and go back in this process; what differs from the dense answer for a mask."""
    p = problem_of(pattern)
    *inputs, dout = tensors(p)
    q, k, v = (x.requires_grad_() for x in inputs)
    cp = context_parallel(strategy=name, pattern=pattern, seqlen=S, heads_q=6, heads_kv=2)
    out = cp.attend(q, k, v)
    out.backward(dout)
    assert q.grad is not None
    assert k.grad is not None
    found = {"out": out.detach(), "dq": q.grad, "dk": k.grad}
    right = calibrate(q.detach(), k.detach(), v.detach(), mask, scale=p.softmax_scale, dout=dout)
    return [str(verdict) for verdict in judge(found, right) if not verdict.passed]


def mask_of(text: str) -> Tensor:
    """A table's mask, cell by cell."""
    rows = [list(map(int, line)) for line in text.split()]
    block = [max(i for i in range(3) if i * S // 3 <= p) for p in range(S)]
    cells = [[rows[block[q]][block[k]] for k in range(S)] for q in range(S)]
    table, position = torch.tensor(cells), torch.arange(S)
    return (table == 1) | ((table == 2) & (position[None] <= position[:, None]))


@pytest.mark.parametrize("name", ["zigzag", "allgather"])
def test_a_table_that_was_rewritten_is_read_again(tmp_path: Path, name: str) -> None:
    file = tmp_path / "table.txt"
    for text in (DENSE, SPARSE, DENSE):
        file.write_text(text)
        assert wrong(make_pattern(f"table:file={file}", S), mask_of(text), name) == []


def prefix(length: int) -> Pattern:
    """Made by hand: all see a prefix, and what lies before themselves."""
    whole = make_pattern("causal", S)
    bands = (
        replace(whole.bands[0], k1=length, lo=None),
        replace(whole.bands[0], k0=length),
    )
    return Pattern(
        text="prefix",
        seqlen_q=S,
        seqlen_kv=S,
        bands=bands,
        predicate=lambda q, k: (k < length) | (k <= q),
    )


def test_patterns_made_by_hand_under_one_text_do_not_stand_in_for_each_other() -> None:
    position = torch.arange(S)
    for length in (5, 11, 5):
        mask = (position[None] < length) | (position[None] <= position[:, None])
        assert wrong(prefix(length), mask) == []


def test_equal_content_makes_equal_patterns_plans_and_hashes() -> None:
    assert prefix(5) == prefix(5)
    assert hash(prefix(5)) == hash(prefix(5))
    assert prefix(5) != prefix(6)
    assert prefix(5) != "prefix"
    assert {prefix(5): 1}.get(prefix(6)) is None
    remapped = replace(make_pattern("strided_original", S), remap=tuple(range(16)))
    assert remapped != make_pattern("strided_original", S)


def test_a_plan_says_what_its_pattern_allows_where_the_text_does_not(tmp_path: Path) -> None:
    file = tmp_path / "table.txt"
    hashes = set()
    for text in ("10\n01\n", "01\n10\n"):  # of one area, for ranks of one load
        file.write_text(text)
        pattern = make_pattern(f"table:file={file}", 24)
        plan = strategy("ulysses").plan(replace(problem_of(pattern), cp=2), Direction.FORWARD)
        assert f'"pattern_content":"{pattern.content}"' in to_json(plan)
        hashes.add(plan.hash)
    assert len(hashes) == 2
    assert from_json(to_json(plan)) == plan
    file.write_text("11\n11\n")
    with pytest.raises(ValueError, match=r"pattern_content .* has changed since, so plan again"):
        from_json(to_json(plan))


@pytest.mark.parametrize("text", ["causal", "documents:lengths=9+14", "star", "window:left=5"])
def test_a_text_that_says_it_all_stands_alone_in_a_plan(text: str) -> None:
    plan = strategy("ring").plan(problem_of(make_pattern(text, S)), Direction.FORWARD)
    assert "pattern_content" not in to_json(plan)


def test_a_known_text_over_other_bands_is_said_and_refused_by_peers() -> None:
    causal, full = make_pattern("causal", S), make_pattern("full", S)
    posing = replace(full, text="causal")
    assert posing != causal
    plan = strategy("ring").plan(problem_of(posing), Direction.FORWARD)
    assert posing.content in to_json(plan)
    halves = replace(problem_of(posing), dtype=Dtype.BFLOAT16, cp=2)
    with pytest.raises(UnsupportedError, match=r"pattern \(causal\) must be what its text says"):
        refuse(peer("peer:yunchang/ulysses"), halves)


def own_file(folder: str) -> str:
    """Each rank reads a file of its own under one name; the areas are equal."""
    rank = dist.get_rank()
    file = Path(folder) / "table.txt"
    for turn in range(2):
        dist.barrier()
        if rank == turn:
            file.write_text("10\n01\n" if rank else "01\n10\n")
            pattern = make_pattern(f"table:file={file}", 22)
        dist.barrier()
    cp = context_parallel(strategy="ulysses", pattern=pattern, seqlen=22, heads_q=6, heads_kv=2)
    part = cp.queries.tokens(rank)
    try:
        cp.attend(torch.ones(2, 6, part, 8), *torch.ones(2, 2, 2, part, 8))
    except PlanError as error:
        return str(error)
    return "not noticed"


def test_ranks_whose_files_differ_are_told(tmp_path: Path) -> None:
    both = ranks(2).run(own_file, str(tmp_path))
    assert both[0] == both[1]
    assert "pattern_content: " in both[0]


def test_a_numpy_table_is_its_numbers(tmp_path: Path) -> None:
    file = tmp_path / "table.npy"
    contents = []
    for cells in ([[1, 0], [2, 1]], [[1, 0], [0, 1]], [[1, 0], [2, 1]]):
        np.save(file, np.array(cells, dtype=np.int64))
        contents.append(make_pattern(f"table:file={file}", S).content)
    assert contents[0] == contents[2] != contents[1]
