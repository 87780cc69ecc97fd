"""Device programs under adverse timings: the executor's bits, or a broken program gives it away."""

from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest
import torch

from harness.check.cell import start
from harness.execute.interpreter import execute
from harness.execute.transport import LocalTransport
from harness.oracle.reference import inputs_of
from harness.plan.problem import Dtype, Problem
from harness.plan.tasks import Resident
from harness.play.adversary import run_under
from harness.play.policies import POLICIES, Turn, by_priority
from harness.prepare.verified_plans import planned
from harness.program.emit import emit
from harness.program.mutations import MUTATIONS
from harness.program.operations import Group, Kernel, KernelLaunch, Lane, Wait
from scripts.prove_programs import Subject, agrees, refusal, same_bits, subjects
from tests.support import layer_problem, problem

Bits = Mapping[Resident, torch.Tensor]


def compared(p: Problem, text: str, gpus_per_node: int = 3) -> None:
    tensors, saved = inputs_of(p, 0), dict[Resident, torch.Tensor]()
    both = planned(p, text)
    for resolved in (both.forward, both.backward):
        inputs = start(resolved.plan, tensors, saved, range(p.cp))
        saved = execute(resolved, inputs, LocalTransport(p.cp)).results
        program = emit(resolved, gpus_per_node)
        for seed, policy in enumerate(Random(text).sample([*POLICIES.values()], 3)):
            ended = run_under(resolved.plan, program, inputs, policy(Random(seed)))
            assert same_bits(ended, saved)


@pytest.mark.parametrize("text", ["zigzag", "ulysses", "grid:rows=2", "double_ring:inner=2"])
@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT64])
def test_attention_has_the_executors_bits_under_every_policy(text: str, dtype: Dtype) -> None:
    compared(problem("window:left=7", 23, (8, 4), dims=(6, 4), dtype=dtype, cp=4), text)


def test_a_rank_without_tokens_and_lengths_that_differ() -> None:
    compared(problem("full", 3, (6, 2), seqlen_kv=5, dims=(6, 4), cp=4), "allgather")


@pytest.mark.parametrize("text", ["fpdt", "upipe", "ring:offload=true,sum_gradients=true"])
def test_layers_have_the_executors_bits_under_every_policy(text: str) -> None:
    compared(layer_problem(seqlen=19, heads=(8, 4), dtype=Dtype.BFLOAT16), text)


@pytest.fixture(scope="module")
def found() -> list[Subject]:
    return list(subjects())


@pytest.mark.parametrize("kind", MUTATIONS)
def test_runs_agree_with_the_proof_about_broken_programs(kind: str, found: list[Subject]) -> None:
    draw = Random(kind)
    for subject in draw.sample(found, 2):
        mutant = MUTATIONS[kind](subject.program, draw)
        assert mutant is not None
        assert mutant != subject.program
        wrong = refusal(subject.resolved, mutant)
        assert agrees(subject, mutant, draw, right=not wrong), wrong


def test_the_priorities_of_lanes_last_until_they_fall() -> None:
    turns = [Turn(rank, lane, ends=False) for rank in range(2) for lane in Lane]
    choose = by_priority(Random(3), depth=2, steps=10)
    chosen = [choose(turns) for _ in range(20)]
    assert len(set(chosen)) == 2
    assert len(set(chosen[-9:])) == 1


def test_a_copy_onto_bytes_of_its_own_is_told(found: list[Subject]) -> None:
    for subject in found:
        for at, rank in enumerate(subject.program.ranks):
            for number, operation in enumerate(rank.operations):
                if not isinstance(operation, KernelLaunch) or operation.kernel is not Kernel.COPY:
                    continue
                source, target = *operation.reads, *operation.writes
                if source.dtype is target.dtype:
                    continue  # torch moves bytes that overlap as if they did not
                aside = target._replace(offset=source.offset)
                operations = list(rank.operations)
                operations[number] = operation._replace(writes=(aside,))
                ranks = list(subject.program.ranks)
                ranks[at] = replace(rank, operations=tuple(operations))
                broken = replace(subject.program, ranks=tuple(ranks))
                policy = POLICIES["random"](Random(1))
                ended = run_under(subject.resolved.plan, broken, subject.inputs, policy)
                assert ended.changed
                return
    raise AssertionError("no subject copies into another precision")


def test_subjects_wait_and_send(found: list[Subject]) -> None:
    for subject in found:
        kinds = {type(op) for rank in subject.program.ranks for op in rank.operations}
        assert {Group, Wait} <= kinds
