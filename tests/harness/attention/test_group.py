"""Who shares attention, and what is said to one who was launched beside others and is alone."""

import warnings

import pytest
import torch.distributed as dist

from harness.attention import context_parallel, group


def test_a_launched_process_without_a_group_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.warns(UserWarning, match=r"WORLD_SIZE is 4, .* call .*init_process_group first"):
        cp = context_parallel(seqlen=23, heads_q=6)
    assert cp.cp == 1


def test_the_warning_comes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for heads in (6, 8):
            context_parallel(seqlen=23, heads_q=heads)
        context_parallel(seqlen=29, heads_q=6)
    assert len(caught) == 1


@pytest.mark.parametrize("world", ["1", "", "many"])
def test_one_process_is_alone_without_a_word(world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        context_parallel(seqlen=23, heads_q=6)


@pytest.mark.parametrize(
    ("backends", "at_once"),
    [("cuda:nccl", True), ("cpu:gloo,cuda:nccl", True), ("cpu:gloo", False)],
)
def test_the_messages_of_a_task_are_issued_at_once_where_nccl_needs_it(
    backends: str, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(dist, "get_backend_config", lambda _: backends)
    monkeypatch.setattr(group, "GroupTransport", lambda _, *, batched: made.append(batched))
    group.transport_of(dist.group.WORLD or dist.GroupMember.NON_GROUP_MEMBER)

    assert made == [at_once]
