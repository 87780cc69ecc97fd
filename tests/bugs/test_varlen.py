"""Packed documents: of any length, across any edge of a shard."""

import pytest

from harness.attention import run_all
from tests.support import EVERY_STRATEGY, failures, problem, tensors, tolerance_of, wrong


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
@pytest.mark.parametrize("cp", [2, 8])
@pytest.mark.parametrize("lengths", ["11+3+17", "2+20+9"])
def test_b008_each_pack_has_its_own_documents(lengths: str, cp: int, strategy: str) -> None:
    p = problem(f"documents:lengths={lengths}", 31, (8, 2), batch=1, cp=cp)
    assert wrong(p, strategy) == ""


def test_b008_documents_of_another_pack_are_seen_to_be_wrong() -> None:
    one = problem("documents:lengths=11+3+17", 31, (8, 2), batch=1, cp=2)
    other = problem("documents:lengths=2+20+9", 31, (8, 2), batch=1, cp=2)
    q, k, v, dout = tensors(one)
    results = run_all(other, "zigzag", q, k, v, dout=dout).results
    assert {verdict.name for verdict in failures(one, results)} == set(tolerance_of(one).scales)


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_b058_no_document_has_to_divide_by_anything(mask: str, strategy: str) -> None:
    p = problem(f"documents:lengths=5+11+48,mask={mask}", 64, (6, 2), batch=1, cp=4)
    assert wrong(p, strategy) == ""


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_b058_documents_of_one_token_beside_a_long_one(strategy: str) -> None:
    p = problem("documents:lengths=1+1+1+100", 103, (6, 2), batch=1, cp=4)
    assert wrong(p, strategy) == ""
