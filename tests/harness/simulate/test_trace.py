"""Traces: their figures by hand and by brute force, and the forms that they are written in."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.cluster.presets import cluster, h100
from harness.commands import trace as verb
from harness.errors import UnsupportedError
from harness.execute import shards
from harness.execute.interpreter import TaskSpan as RunSpan
from harness.execute.interpreter import execute
from harness.execute.transport import LocalTransport
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.residency import Program
from harness.plan.sizes import leg_bytes
from harness.plan.tasks import Tensor, legs_of, ranks_of
from harness.simulate.chrome import to_chrome
from harness.simulate.gantt import gantt
from harness.simulate.queues import LINK_STREAMS, Stream
from harness.simulate.simulator import simulate
from harness.simulate.trace import Span, Trace, TraceSource, measured_trace, task_kind
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import strategy

COMPUTE, OUT, IN = Stream.COMPUTE, Stream.NVLINK_OUT, Stream.NVLINK_IN


def planned(name: str, cp: int = 4, dtype: Dtype = Dtype.BFLOAT16) -> Program:
    problem = Problem(
        pattern=make_pattern("causal", 64 * cp),
        heads_q=8,
        heads_kv=8,
        head_dim=16,
        dtype=dtype,
        cp=cp,
    )
    return verify(strategy(name).plan(problem, Direction.FORWARD))


def traced(*spans: Span, cp: int = 2) -> Trace:
    return Trace(
        strategy="ring",
        direction="forward",
        cp=cp,
        source=TraceSource.SIMULATED,
        machine="h100-1x8",
        calibration="none",
        labels=("a", "b", "c", "d"),
        spans=spans,
    )


BY_HAND = traced(
    Span(0, COMPUTE, 0, "tile", 0.0, 4.0),
    Span(0, OUT, 1, "transfer", 3.0, 6.0, 100),
    Span(1, IN, 1, "transfer", 3.0, 6.0, 100),
    Span(1, COMPUTE, 2, "tile", 0.0, 1.0),
    Span(1, COMPUTE, 3, "tile", 6.0, 8.0),
    Span(1, COMPUTE, 3, "finish", 8.0, 10.0),
)


def test_figures_of_a_trace_by_hand() -> None:
    assert BY_HAND.makespan_s == 10.0
    assert BY_HAND.busy_s == {(0, COMPUTE): 4.0, (0, OUT): 3.0, (1, IN): 3.0, (1, COMPUTE): 5.0}
    assert BY_HAND.transfer_s == (3.0, 3.0)
    # Rank 0 computes until 4 of 3..6; rank 1 computes nothing then.
    assert BY_HAND.exposed_comm_s == (2.0, 3.0)
    assert (BY_HAND.exposed_comm_max_s, BY_HAND.exposed_comm_mean_s) == (3.0, 2.5)
    assert BY_HAND.overlap == pytest.approx(1 / 6)
    # Tiles: 4 against 1 + 2; the mean is 3.5. In lockstep max(4, 1) + max(0, 2) = 6.
    assert BY_HAND.imbalance_total == pytest.approx(4 / 3.5)
    assert BY_HAND.imbalance_lockstep == pytest.approx(6 / 3.5)
    assert BY_HAND.link_bytes == {"nvlink": 100}
    assert BY_HAND.utilisation([OUT, IN]) == pytest.approx(6 / 40)
    assert BY_HAND.utilisation([OUT], ranks=1) == pytest.approx(0.3)


def test_a_trace_of_nothing_has_figures_too() -> None:
    empty = traced()

    assert (empty.makespan_s, empty.overlap, empty.imbalance_total) == (0.0, None, 1.0)
    assert empty.imbalance_lockstep == 1.0
    assert empty.utilisation([OUT]) == 0.0
    assert "0.000 ms" in gantt(empty)


def test_host_links_count_both_directions() -> None:
    trace = traced(
        Span(0, Stream.HOST_OUT, 0, "transfer", 0.0, 1.0, 5),
        Span(0, Stream.HOST_IN, 1, "transfer", 1.0, 2.0, 7),
    )

    assert trace.link_bytes == {"host": 12}


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20), st.integers(0, 6)), max_size=12))
def test_exposed_time_is_what_counting_ticks_gives(spans: list[tuple[bool, int, int]]) -> None:
    trace = traced(
        *(
            Span(0, OUT if moves else COMPUTE, 0, "x", float(start), float(start + length))
            for moves, start, length in spans
        ),
        cp=1,
    )

    def ticks(wanted: bool) -> set[int]:
        return {
            tick
            for moves, start, length in spans
            if moves is wanted
            for tick in range(start, start + length)
        }

    assert trace.transfer_s == (float(len(ticks(True))),)
    assert trace.exposed_comm_s == (float(len(ticks(True) - ticks(False))),)


@pytest.mark.parametrize("name", ["ring", "ulysses", "usp:2x2"])
def test_bytes_over_links_are_those_of_the_plan(name: str) -> None:
    program = planned(name)
    trace = simulate(program, replace(h100(2), gpus_per_node=2))
    plan = program.plan
    total = sum(leg_bytes(plan, leg) for task in plan.tasks for leg in legs_of(task))

    assert sum(trace.link_bytes.values()) == total > 0
    for ins, outs in ((Stream.NVLINK_IN, OUT), (Stream.NIC_IN, Stream.NIC_OUT)):
        moved = [
            sum(s.size_bytes for s in trace.spans if s.stream is stream) for stream in (ins, outs)
        ]
        assert moved[0] == moved[1]


@pytest.mark.parametrize("name", ["ring", "ulysses"])
def test_chrome_json_has_a_process_per_rank_a_thread_per_stream_and_the_same_sums(
    name: str,
) -> None:
    trace = simulate(planned(name), cluster("h100-8x8"))
    body = json.loads(to_chrome(trace))
    events = body["traceEvents"]
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    busy: dict[tuple[int, str], float] = {}
    for event in events:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        if event["ph"] == "X":
            assert min(event["ts"], event["dur"]) >= 0
            stream = names["thread_name", event["pid"], event["tid"]]
            busy[event["pid"], stream] = busy.get((event["pid"], stream), 0.0) + event["dur"]

    assert {n for (what, _, _), n in names.items() if what == "process_name"} == {
        f"rank {rank}" for rank in range(4)
    }
    assert busy == pytest.approx({(r, s.value): 1e6 * t for (r, s), t in trace.busy_s.items()})
    assert len([e for e in events if e["ph"] == "X"]) == len(trace.spans)
    assert body["otherData"]["makespan_s"] == trace.makespan_s
    first, *_, last = [e for e in events if e["ph"] == "X"]
    assert first["ts"] == pytest.approx(1e6 * trace.spans[0].start_s)
    assert last["ts"] + last["dur"] == pytest.approx(1e6 * trace.spans[-1].end_s)


def test_a_gantt_chart_shows_who_did_what_when() -> None:
    lines = gantt(BY_HAND, width=36).splitlines()

    assert lines == [
        "ring forward cp=2",
        "on h100-1x8: 10000.000 ms",
        "   0 compute    ████████",
        "     nvlink_out       ━━━━━━",
        "   1 compute    ██          ████▓▓▓▓",
        "     nvlink_in        ━━━━━━",
        "█ attends or multiplies, ▓ merges or",
        "finishes, ━ transfers; simulated;",
        "none",
    ]


def test_a_gantt_chart_fits_its_width_and_says_which_ranks_it_leaves_out() -> None:
    base = cluster("h100-8x8")
    slow = replace(base, nvlink=replace(base.nvlink, bandwidth_bytes_per_s=1e6))
    chart = gantt(simulate(planned("ulysses", cp=8), slow), width=60, ranks=3)

    assert all(len(line) <= 60 for line in chart.splitlines())
    assert "(5 more ranks)" in chart
    assert "═ collective" in chart
    assert "▓" not in chart  # what is not drawn is not explained


def test_a_cell_that_is_used_for_less_than_half_is_a_dot() -> None:
    spans = (Span(0, COMPUTE, 0, "tile", 0.0, 1.0), Span(0, OUT, 1, "transfer", 0.0, 32.0))

    assert "   0 compute    ·" in gantt(traced(*spans), width=24).splitlines()


def test_a_span_that_rounding_puts_over_the_edge_of_a_cell_does_not_enter_it() -> None:
    assert int(0.63 / (0.7 / 10)) == 9
    assert 0.63 > 9 * (0.7 / 10)  # by one unit in the last place
    spans = (Span(0, COMPUTE, 0, "tile", 0.0, 0.63), Span(0, OUT, 1, "transfer", 0.0, 0.7))

    lines = gantt(traced(*spans), width=26).splitlines()
    assert "   0 compute    " + 9 * "█" in lines


def test_a_measured_run_becomes_the_same_type() -> None:
    program = planned("ring", dtype=Dtype.FLOAT64)
    plan = program.plan
    tensors = {
        kind: torch.randn(1, 8, 256, 16, dtype=torch.float64)
        for kind in (Tensor.Q, Tensor.K, Tensor.V)
    }
    inputs = shards.initial_inputs(plan, tensors, range(4))
    run = execute(program, inputs, LocalTransport(4), timed=True)
    trace = measured_trace(program, run.spans, "here")

    assert (trace.source, trace.machine, trace.calibration) == (
        TraceSource.MEASURED,
        "here",
        "measured",
    )
    done = {(s.rank, s.task) for s in trace.spans if s.stream is not Stream.WAIT}
    assert done == {(rank, t) for t, task in enumerate(plan.tasks) for rank in ranks_of(task)}
    assert min(span.start_s for span in trace.spans) == 0.0
    longest = max(span.end_s for span in run.spans) - min(span.start_s for span in run.spans)
    assert trace.makespan_s == pytest.approx(longest)
    assert trace.busy_s[0, COMPUTE] > 0
    assert {COMPUTE, Stream.TRANSFER} <= {span.stream for span in trace.spans}
    total = sum(leg_bytes(plan, leg) for task in plan.tasks for leg in legs_of(task))
    assert trace.link_bytes == {"transfer": total}
    assert {s.kind for s in simulate(program, cluster("h100-8x8")).spans} == {
        s.kind for s in trace.spans
    }


def test_a_wait_interrupts_the_task_that_needs_what_arrives() -> None:
    program = planned("ring", cp=2)
    kinds = [task_kind(task) for task in program.plan.tasks]
    send, tile = kinds.index("transfer"), len(kinds) - 1 - kinds[::-1].index("tile")
    assert ranks_of(program.plan.tasks[tile]) == (1,)
    trace = measured_trace(
        program,
        [
            RunSpan(send, 0, "transfer", 10.0, 11.0),
            RunSpan(send, 1, "transfer", 10.0, 11.0),
            RunSpan(send, 1, "wait", 13.0, 16.0),
            RunSpan(tile, 1, "compute", 12.0, 20.0),
        ],
        "here",
    )
    sent = leg_bytes(program.plan, legs_of(program.plan.tasks[send])[0])

    assert [s for s in trace.spans if s.stream is COMPUTE] == [
        Span(1, COMPUTE, tile, "tile", 2.0, 3.0),
        Span(1, COMPUTE, tile, "tile", 6.0, 10.0),
    ]
    assert trace.busy_s[1, COMPUTE] == 5.0
    assert trace.exposed_comm_s == (1.0, 1.0 + 3.0)
    assert trace.link_bytes == {"transfer": sent}
    assert trace.imbalance_total == 2.0  # one of two ranks did all of it, as one tile


def test_a_span_of_another_plan_is_refused() -> None:
    program = planned("ring")
    for span in (RunSpan(10**6, 0, "compute", 0, 1), RunSpan(0, 3, "transfer", 0, 1)):
        with pytest.raises(ValueError, match="must name a task of the plan and one of its ranks"):
            measured_trace(program, [span], "here")


def test_every_stream_is_a_link_or_computes_or_launches() -> None:
    assert set(Stream) == LINK_STREAMS | {COMPUTE, Stream.LAUNCH}


# The verb ----------------------------------------------------------------------------------------


def call(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    verb.register(parser.add_subparsers(required=True))
    args = parser.parse_args(["trace", *argv])
    status: int = args.run(args)
    return status


def test_the_verb_draws_and_writes_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "trace.json"
    wanted = ("--strategy", "ring", "--seqlen", "4k", "--cp", "4", "--cluster", "h100-8x8")
    assert call(*wanted, "-o", str(target)) == 0
    text = capsys.readouterr().out

    assert text.startswith("ring causal cp=4 S=4k heads=32/8 D=128 bfloat16 forward\non h100-8x8:")
    assert "not calibrated" in text
    assert "bound, any plan" in text
    assert json.loads(target.read_text())["otherData"]["strategy"] == "ring"
    assert [target] == list(tmp_path.iterdir())


def test_the_verb_prints_figures_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--strategy", "ulysses", "--seqlen", "4k", "--cp", "16", "--json") == 0
    body = json.loads(capsys.readouterr().out)

    assert 0 < body["problem_bound_s"] <= body["bound_s"] <= body["makespan_s"]
    assert set(body["link_bytes"]) == {"nvlink", "nic"}
    assert body["peak_memory_bytes"] > 0


@pytest.mark.parametrize(
    ("argv", "error", "message"),
    [
        (("--cluster", "b300"), ValueError, "choose from h100-hamming"),
        (("--cluster", "h100-1x8", "--cp", "16"), UnsupportedError, "its 8 GPUs"),
        (("--strategy", "nothing"), ValueError, "choose from"),
        (("--seqlen", "1k", "-o", "/nowhere/x.json"), ValueError, "can be written"),
    ],
)
def test_the_verb_refuses_what_it_cannot_do(
    argv: tuple[str, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(*argv)
