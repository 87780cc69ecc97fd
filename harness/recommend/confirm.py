"""Commands that repeat an answer's rows: simulated here, and measured on the real cluster."""

import shlex
from collections.abc import Sequence

from harness.cluster.machine import Runtime
from harness.plan.tasks import Scope
from harness.recommend.question import Asked
from harness.records import defaults
from harness.report.format import short

_HEAD = "HEAD"
"""Stands for the name of the first node."""


def confirming(question: Asked, strategies: Sequence[str]) -> list[str]:
    """Return commands that simulate and that measure exactly these strategies.

    Args:
        question: The problem.
        strategies: As they are typed.
    """
    rows = _rows(question, strategies)
    simulate = ["--mode", "simulate", "--cluster", question.named, *_runtime(question)]
    nodes = -(-question.cp // question.machine.gpus_per_node)
    ranks = min(question.cp, question.machine.gpus_per_node)
    launch = ["torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(ranks)]
    if nodes > 1:
        launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{_HEAD}:29500"]
    sweep = ["-m", "harness", "sweep"]
    return [
        shlex.join(["python", *sweep, *simulate, *rows, "-o", "results/predicted"]),
        shlex.join([*launch, *sweep, "--mode", "measure", *rows, "-o", "results/measured"]),
    ]


def _runtime(question: Asked) -> list[str]:
    graph = question.runtime is Runtime.GRAPH
    return [] if graph else ["--runtime", question.runtime.value]


def _rows(question: Asked, strategies: Sequence[str]) -> list[str]:
    flags = {
        "--strategies": ",".join(strategies),
        "--patterns": ",".join(pattern for pattern, _ in question.patterns),
        "--cp": str(question.cp),
        "--seqlen": short(question.seqlen),
        "--heads": f"{question.heads_q}/{question.heads_kv}",
        "--head-dim": str(question.head_dim),
        "--batch": str(question.batch),
        "--dtype": question.dtype.value,
        "--direction": ",".join(direction.value for direction in question.directions),
        "--scope": question.scope.value,
    }
    if question.scope is Scope.LAYER:
        flags["--hidden"] = str(question.hidden or question.heads_q * question.head_dim)
        if question.rotary is not None:
            flags["--rotary"] = f"{question.rotary:.17g}"
    usual = {"--batch": "1", "--scope": Scope.ATTENTION.value, "--head-dim": str(defaults.HEAD_DIM)}
    return [
        word for flag, value in flags.items() if usual.get(flag) != value for word in (flag, value)
    ]
