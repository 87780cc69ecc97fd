"""What functions remember is bounded by bytes, and what is used stays."""

import sys
from dataclasses import dataclass

import numpy as np
import pytest

from harness.base.remembered import bytes_of, memory_limit_bytes, remembered

MIB = 2**20


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPBENCH_MEMORY_MIB", "10")


def test_results_are_remembered_up_to_so_many_bytes_and_the_latest_used_stay() -> None:
    made: list[int] = []

    @remembered
    def make(number: int) -> bytes:
        made.append(number)
        return bytes(3 * MIB)

    for number in (0, 1, 2, 0, 3, 0):
        assert make(number) is make(number)
    assert made == [0, 1, 2, 3]
    assert 9 * MIB <= make.held_bytes <= 10 * MIB
    make(1)
    assert made == [0, 1, 2, 3, 1]
    make.cache_clear()
    make(0)
    assert made[-1] == 0
    assert make.held_bytes < 4 * MIB


def test_what_is_larger_than_all_that_may_be_is_still_made_once() -> None:
    made: list[int] = []

    @remembered
    def make(size: int, *, fill: int = 0) -> bytes:
        made.append(size)
        return bytes([fill]) * size

    for _ in range(3):
        make(30 * MIB, fill=1)
    assert made == [30 * MIB]
    make(2)
    assert make.held_bytes < MIB


def test_a_failure_is_not_remembered() -> None:
    @remembered
    def make(number: int) -> int:
        return 1 // number

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            make(0)
    assert make.held_bytes == 0


@dataclass(frozen=True)
class Deep:
    items: tuple[object, ...]


def test_bytes_are_those_of_all_that_is_reached_once() -> None:
    array = np.zeros(MIB, dtype=np.int64)
    twice = Deep((array, array, [array], np))

    assert 8 * MIB < bytes_of(twice) < 8 * MIB + 2000
    assert bytes_of(Deep((sys, int, len))) < 500


@pytest.mark.parametrize("count", [10, 5000, 100_003])
def test_long_sequences_are_weighed_by_a_part_of_them(count: int) -> None:
    value = [(f"{n:020}", float(n)) for n in range(count)]
    exact = sys.getsizeof(value) + sum(
        sys.getsizeof(pair) + sum(map(sys.getsizeof, pair)) for pair in value
    )

    assert bytes_of(value) == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("text", ["-1", "1.5", "lots", "1e3", "٣"])
def test_a_limit_that_is_no_number_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPBENCH_MEMORY_MIB", text)
    with pytest.raises(ValueError, match=r"CPBENCH_MEMORY_MIB .* try 256"):
        memory_limit_bytes()
