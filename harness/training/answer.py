"""A model on a cluster under every strategy: longest contexts, peaks, what fills them, seconds."""

from collections.abc import Mapping
from dataclasses import dataclass

from harness.cluster.machine import Cluster
from harness.errors import UnsupportedError
from harness.training.footprint import Footprint, Limit, footprint, max_context, on_cluster
from harness.training.models import Model
from harness.training.stack import HOST_BYTES, Column, Stack, released
from harness.training.step_time import StepTime, step_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Question that each strategy is asked.

    Attributes:
        model: The model to train.
        machine: Over all GPUs of which cluster.
        stack: The training stack around attention.
        gpu_bytes: Memory of a GPU.
        host_bytes: Memory of a node's host.
        step_tokens: Distance of contexts that are tried; None looks at `seqlen` alone.
        seqlen: Tokens, over all ranks.
    """

    model: Model
    machine: Cluster
    stack: Stack
    gpu_bytes: int
    host_bytes: int = HOST_BYTES
    step_tokens: int | None = None
    seqlen: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer for one strategy.

    Attributes:
        name: As it was asked for.
        strategy: As it runs on the cluster, with its options.
        reason: Why it cannot; None if it can.
        released: Whether released code is known, so that its own column exists.
        limits: Per column, the longest context; empty if only one length was asked about.
        seqlen: The longest context, or the length in question; the other fields refer to it.
        at: Memory of a GPU at that length.
        peaks_bytes: Per column, the peak there.
        time: Seconds of a step there.
    """

    name: str
    strategy: str
    reason: str | None = None
    released: bool = False
    limits: Mapping[Column, Limit] | None = None
    seqlen: int = 0
    at: Footprint | None = None
    peaks_bytes: Mapping[Column, int] | None = None
    time: StepTime | None = None


def answer(question: Question, name: str) -> Answer:
    """Ask about one strategy."""
    chosen = on_cluster(name, question.machine)
    try:
        return _answer(question, name)
    except UnsupportedError as error:
        return Answer(name=name, strategy=chosen.text, reason=error.reason)


def _answer(question: Question, name: str) -> Answer:
    model, machine, stack = question.model, question.machine, question.stack
    chosen = on_cluster(name, machine)
    limits: dict[Column, Limit] = {}
    seqlen = question.seqlen
    if question.step_tokens is not None:
        limits = {
            column: max_context(
                model,
                chosen,
                machine,
                column=column,
                stack=stack,
                gpu_bytes=question.gpu_bytes,
                host_bytes=question.host_bytes,
                step_tokens=question.step_tokens,
            )
            for column in Column
        }
        seqlen = limits[Column.RELEASED].tokens
    prints = {
        column: footprint(model, chosen, machine, seqlen, column=column, stack=stack)
        for column in Column
        if seqlen
    }
    return Answer(
        name=name,
        strategy=chosen.text,
        released=released(chosen) is not None,
        limits=limits,
        seqlen=seqlen,
        at=prints.get(Column.RELEASED),
        peaks_bytes={column: found.peak_bytes for column, found in prints.items()},
        time=step_time(model, chosen, machine, seqlen, stack=stack) if seqlen else None,
    )
