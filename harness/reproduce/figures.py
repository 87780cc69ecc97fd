"""Figures of training a whole model: throughput, memory, longest contexts, counts of a layer.

A setting has `model`, `cluster`, `strategy`, and `thousands`, the context in units of 1024 tokens.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from harness.cluster.machine import Cluster
from harness.cluster.presets import cluster
from harness.memory.ledger import trade_buffers
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.tasks import Collective, CollectiveKind
from harness.proved.plans import proved
from harness.training.attention_memory import attention_held, layer_program
from harness.training.footprint import footprint, max_context, on_cluster
from harness.training.models import Model
from harness.training.named_models import model
from harness.training.stack import Column, counting
from harness.training.step_time import step_time
from patterns import make_pattern
from strategies import strategy

ClaimSetting = Mapping[str, Any]
_GIB = 2**30
_K = 2**10


def throughput(setting: ClaimSetting) -> float:
    """Tokens per second and GPU of a training step."""
    return _throughput(setting, setting["strategy"])


def throughput_over(setting: ClaimSetting) -> float:
    """Throughput of `strategy` over that of `other`."""
    return throughput(setting) / _throughput(setting, setting["other"])


def _throughput(setting: ClaimSetting, name: str) -> float:
    machine, seqlen = cluster(setting["cluster"]), _tokens(setting)
    time = step_time(model(setting["model"]), on_cluster(name, machine), machine, seqlen)
    return seqlen / machine.gpus / time.seconds


def peak_gib(setting: ClaimSetting) -> float:
    """Peak of a GPU, as released (GiB)."""
    machine = cluster(setting["cluster"])
    chosen = on_cluster(setting["strategy"], machine)
    return footprint(model(setting["model"]), chosen, machine, _tokens(setting)).peak_bytes / _GIB


def attention_gib(setting: ClaimSetting) -> float:
    """Memory of attention at its backward peak, as released (GiB)."""
    shape, machine = model(setting["model"]), cluster(setting["cluster"])
    chosen = on_cluster(setting["strategy"], machine)
    held = attention_held(
        shape,
        chosen,
        machine.gpus,
        machine.gpus_per_node,
        _tokens(setting),
        counting(Column.RELEASED, chosen),
    )
    return sum(held.backward.values()) / _GIB


def longest_context(setting: ClaimSetting) -> float:
    """Longest context that fits, in units of 1024 tokens."""
    machine = cluster(setting["cluster"])
    chosen = on_cluster(setting["strategy"], machine)
    return max_context(model(setting["model"]), chosen, machine).tokens / _K


def longer_context(setting: ClaimSetting) -> float:
    """By which share the longest context of `strategy` is longer than that of `other`."""
    other = {**setting, "strategy": setting["other"]}
    return longest_context(setting) / longest_context(other) - 1


def layer_all_to_alls(setting: ClaimSetting) -> float:
    """All-to-alls of one layer, counted in its plan."""
    shape, machine = model(setting["model"]), cluster(setting["cluster"])
    direction = Direction(setting["direction"])
    return all_to_alls(shape, setting["strategy"], machine, direction)


def all_to_alls(shape: Model, name: str, machine: Cluster, direction: Direction) -> int:
    """All-to-alls of one layer of a model, counted in its plan."""
    program = layer_program(
        shape, name, machine.gpus, machine.gpus_per_node, _K * machine.gpus, direction
    )
    return sum(
        isinstance(task, Collective) and task.kind is CollectiveKind.ALL_TO_ALL
        for task in program.plan.tasks
    )


def buffers_saved(setting: ClaimSetting) -> float:
    """Share of q, k, v and all-to-all buffers that stages of `stage` heads save over `other`."""
    query, kv = (int(n) for n in setting["heads"].split("/"))
    staged = f"{setting['strategy']}:stage_heads={setting['stage']}"
    return 1 - _buffers(staged, query, kv, setting["cp"]) / _buffers(
        setting["other"], query, kv, setting["cp"]
    )


@lru_cache
def _buffers(name: str, query: int, kv: int, cp: int) -> int:
    problem = Problem(
        pattern=make_pattern("causal", _K * cp),
        heads_q=query,
        heads_kv=kv,
        head_dim=128,
        dtype=Dtype.BFLOAT16,
        cp=cp,
        hidden=query * 128,
    )
    return trade_buffers(proved(strategy(name), problem, Direction.FORWARD))[0]


def _tokens(setting: ClaimSetting) -> int:
    return int(setting["thousands"]) * _K
