"""The memory account: what the allocator really gave, charged to the right rank."""

import torch

from harness.execute.allocator_account import Account
from harness.plan.tasks import Memory, Place

KIB = 1024


def floats(kib: int) -> torch.Tensor:
    return torch.empty(kib * KIB // 4)


def test_what_is_made_counts_until_it_is_freed() -> None:
    with Account(2, {}) as account:
        account.on_place(Place(1))
        first, second = floats(4), floats(3)
        assert account.live[Place(1)] == 7 * KIB
        del first
        assert account.live[Place(1)] == 3 * KIB
        third = floats(2)
    assert account.peaks() == (0, 7 * KIB)
    assert account.live[Place(1)] == second.nbytes + third.nbytes


def test_inputs_count_from_the_start_and_throughout() -> None:
    kept = floats(5)
    with Account(3, {Place(2): [kept]}) as account:
        assert account.live[Place(2)] == 5 * KIB
    assert account.peaks() == (0, 0, 5 * KIB)


def test_views_and_shared_storage_count_once() -> None:
    with Account(1, {}) as account:
        whole = floats(6)
        part = whole[:100].view(10, 10).T
        assert account.live[Place(0)] == 6 * KIB
        copy = part.contiguous()
    assert account.peaks() == (6 * KIB + copy.nbytes,)


def test_a_view_keeps_the_storage_that_it_looks_into() -> None:
    with Account(1, {}) as account:
        part = floats(6)[:1]
        assert account.live[Place(0)] == 6 * KIB
        del part
        assert account.live[Place(0)] == 0


def test_what_a_kernel_makes_and_frees_inside_is_left_out_and_what_it_leaves_counts() -> None:
    with Account(1, {}) as account:
        with account.in_kernel():
            scratch = floats(50)
            result = floats(2)
            del scratch
        assert account.peaks() == (2 * KIB,)
        assert account.live[Place(0)] == result.nbytes


def test_the_memory_of_host_and_device_are_apart() -> None:
    with Account(2, {}) as account:
        account.on_place(Place(0, Memory.HOST))
        kept = floats(9)
        account.on_place(Place(0))
        also = floats(1)
    assert account.peaks(Memory.HOST) == (kept.nbytes, 0)
    assert account.peaks() == (also.nbytes, 0)


def test_freeing_is_charged_to_the_rank_that_made_it() -> None:
    with Account(2, {}) as account:
        tensor = floats(4)
        account.on_place(Place(1))
        del tensor
        assert (account.live[Place(0)], account.live[Place(1)]) == (0, 0)
