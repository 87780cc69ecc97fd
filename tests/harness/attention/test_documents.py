"""Packed documents and padding from lengths, and positions that start anew in each document."""

import numpy as np
import pytest
import torch

from harness.attention import attention, context_parallel, documents_of
from harness.oracle.tolerance import calibrate, judge
from patterns import Pattern, make_pattern
from tests.support import problem, tensors, wrong


@pytest.mark.parametrize(
    "made",
    [
        documents_of([0, 5, 16, 37]),
        documents_of(torch.tensor([0, 5, 16, 37], dtype=torch.int32)),
        documents_of(np.array([0, 5, 5, 16, 37])),
        documents_of(lengths=torch.tensor([5, 11, 21])),
        documents_of(lengths=[[5, 11, 21], [5, 11, 21]]),
    ],
)
def test_lengths_of_any_kind_are_one_pattern(made: Pattern) -> None:
    assert made == make_pattern("documents:lengths=5+11+21", 37)


def test_what_is_behind_the_documents_is_padding() -> None:
    made = documents_of([0, 5, 16], seqlen=19, causal=False)
    assert made.text == "documents:lengths=5+11,mask=full,padding=3"
    seen = made.allowed(np.arange(19), np.arange(19))
    expected = np.zeros((19, 19), dtype=bool)
    expected[:5, :5] = expected[5:16, 5:16] = True
    assert (seen == expected).all()
    assert made.total_area == expected.sum()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give cu_seqlens or lengths"),
        ({"cu_seqlens": [0, 5], "lengths": [5]}, "give cu_seqlens or lengths"),
        ({"cu_seqlens": [1, 5]}, r"cu_seqlens \(1, 5\) must start with 0"),
        ({"cu_seqlens": [0, 9, 5]}, "never fall"),
        ({"lengths": [0, 0]}, "one above 0"),
        ({"lengths": [5, -1]}, "0 or more"),
        ({"lengths": [5.5]}, r"lengths \(5\.5\) must be a whole number"),
        ({"lengths": [5, 11], "seqlen": 15}, r"seqlen \(15\) is less than the 16 tokens"),
        ({"lengths": [[5], [7]], "seqlen": 9}, "2 rows that differ.* side by side"),
    ],
)
def test_what_is_no_length_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        documents_of(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "strategy", ["ring", "zigzag", "stripe", "ulysses", "usp:2x2", "allgather"]
)
@pytest.mark.parametrize(
    "pattern", ["documents:lengths=5+11,padding=21", "documents:lengths=29,mask=full,padding=8"]
)
def test_padding_is_no_part_of_attention_nor_of_a_gradient(strategy: str, pattern: str) -> None:
    assert wrong(problem(pattern, 37, (6, 2), dims=(8, 5)), strategy) == ""


def test_key_padding_equals_attention_to_the_tokens_that_are_there() -> None:
    q, k, v, _ = tensors(problem("full", 37, (6, 2), dims=(8, 5), cp=1))
    out = attention(q, k, v, pattern=documents_of(lengths=[29], seqlen=37, causal=False))
    q, k, v = (x[:, :, :29] for x in (q, k, v))
    right = calibrate(q, k, v, torch.ones(29, 29, dtype=torch.bool), scale=8**-0.5)
    assert all(each.passed for each in judge({"out": out[:, :, :29]}, right))
    assert not out[:, :, 29:].any()


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("documents:lengths=3+1+4", [0, 1, 2, 0, 0, 1, 2, 3]),
        ("documents:lengths=3+2,padding=3", [0, 1, 2, 0, 1, 0, 1, 2]),
        ("causal", [*range(8)]),
        ("full", [*range(8)]),
        ("window:left=2", [*range(8)]),
        ("star", [*range(8)]),
    ],
)
def test_positions_start_anew_in_each_document(pattern: str, expected: list[int]) -> None:
    cp = context_parallel(seqlen=8, heads_q=2, pattern=pattern)
    assert cp.document_positions.tolist() == expected
    assert cp.document_positions is cp.document_positions
