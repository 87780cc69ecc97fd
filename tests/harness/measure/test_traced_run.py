"""A measured run as a trace: its Chrome JSON and its sums, from real processes."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.check.cell import planned_traffic
from harness.commands import trace as verb
from harness.errors import UnsupportedError
from harness.measure.traced_run import Traced, traced
from harness.plan.plan import Plan
from harness.plan.problem import Direction
from harness.prepare.verified_plans import planned, planned_for
from harness.ranks import team as teams
from harness.ranks.team import Team
from harness.records.config import Config, Where
from harness.simulate.chrome import to_chrome
from harness.simulate.queues import Stream
from harness.simulate.trace import TraceSource

CONFIG = Config(
    strategy="ring",
    pattern="full",
    cp=2,
    seqlen_q=96,
    seqlen_kv=96,
    heads_q=4,
    heads_kv=2,
    head_dim=16,
    transport=Where.GLOO,
)


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with Team(2) as ours:
        yield ours


def the_cells() -> list[Config]:
    return [
        replace(CONFIG, strategy=name, direction=direction)
        for name in ("ring", "ulysses", "allgather")
        for direction in Direction
    ]


def plan_of(config: Config) -> Plan:
    both = planned_for(config)
    return (both.forward if config.direction is Direction.FORWARD else both.backward).plan


@pytest.fixture(scope="module", params=the_cells(), ids=lambda c: f"{c.strategy}-{c.direction}")
def run(request: pytest.FixtureRequest, team: Team) -> tuple[Config, Traced]:
    config: Config = request.param
    return config, traced(config, team, 60.0)


def test_sums_of_a_measured_trace_are_those_of_its_record(run: tuple[Config, Traced]) -> None:
    config, found = run
    trace = found.trace
    sent, _ = planned_traffic(plan_of(config))

    assert (trace.source, trace.cp, trace.direction) == (TraceSource.MEASURED, 2, config.direction)
    assert trace.link_bytes == {"transfer": sum(sent.values())}
    by_rank = dict.fromkeys(sent, 0)
    for span in trace.spans:
        by_rank[span.rank] += span.size_bytes
    assert by_rank == sent
    assert found.bytes_sent_per_rank == max(sent.values())
    waits = [trace.busy_s.get((rank, Stream.WAIT), 0.0) for rank in range(2)]
    assert max(waits) == pytest.approx(found.exposed_comm_s, abs=1e-9)
    assert 0 < trace.makespan_s < 10
    assert min(span.start_s for span in trace.spans) == 0.0
    assert trace.peak_memory_bytes is not None


def test_every_task_of_the_plan_is_in_the_trace_of_each_of_its_ranks(
    run: tuple[Config, Traced],
) -> None:
    config, found = run
    plan = plan_of(config)
    seen = {span.task for span in found.trace.spans}

    assert seen == set(range(len(plan.tasks)))
    kinds = {span.kind for span in found.trace.spans if span.stream is Stream.COMPUTE}
    assert "tile" in kinds


def test_it_is_valid_chrome_json_with_a_process_per_rank_and_a_thread_per_stream(
    run: tuple[Config, Traced],
) -> None:
    _, found = run
    body = json.loads(to_chrome(found.trace))
    events: list[dict[str, Any]] = body["traceEvents"]

    names = [e for e in events if e["ph"] == "M"]
    ranks = {e["pid"]: e["args"]["name"] for e in names if e["name"] == "process_name"}
    assert ranks == {0: "rank 0", 1: "rank 1"}
    threads = [(e["pid"], e["tid"]) for e in names if e["name"] == "thread_name"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(found.trace.spans)
    assert len(set(threads)) == len(threads)
    assert {(e["pid"], e["tid"]) for e in spans} == set(threads)
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans)
    end_us = max(e["ts"] + e["dur"] for e in spans)
    assert end_us / 1e6 == pytest.approx(found.trace.makespan_s)


def test_what_a_strategy_refuses_is_refused_here_too(team: Team) -> None:
    config = replace(CONFIG, strategy="ulysses", heads_q=1, heads_kv=1)
    with pytest.raises(UnsupportedError, match="heads_q"):
        traced(config, team, 60.0)


def test_a_run_that_would_take_hours_is_refused(team: Team) -> None:
    config = replace(CONFIG, seqlen_q=2**17, seqlen_kv=2**17, head_dim=128)
    assert planned(config.problem, config.strategy)
    with pytest.raises(ValueError, match=r"7\.0e\+13 flops must be at most 2e\+12"):
        traced(replace(config, heads_q=8), team, 60.0)


def test_the_verb_draws_writes_and_prints_a_measured_run(
    team: Team, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Borrowed:
        """The team of this module, left running."""

        def __init__(self, cp: int) -> None:
            assert cp == 2

        def __enter__(self) -> Team:
            return team

        def __exit__(self, *_: object) -> None:
            return None

    monkeypatch.setattr(teams, "Team", Borrowed)
    parser = argparse.ArgumentParser()
    verb.register(parser.add_subparsers())
    file = tmp_path / "trace.json"
    words = ["trace", "--measured", "--strategy", "ring", "--cp", "2", "--seqlen", "64"]
    words += ["--heads-q", "2", "--head-dim", "8", "--dtype", "float32", "-o", str(file)]
    args = parser.parse_args(words)
    assert args.run(args) == 0
    drawn = capsys.readouterr().out
    assert "ring causal cp=2 S=64 heads=2/2 D=8 float32 forward" in drawn
    assert "; measured" in drawn
    assert json.loads(file.read_text())["traceEvents"]

    args = parser.parse_args([*words, "--json"])
    assert args.run(args) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["source"] == "measured"
    # Causal: rank 0 sends k and v of 32 tokens and 2 heads to rank 1, and nothing comes back.
    assert body["bytes_sent_per_rank"] == 2 * 32 * 2 * 8 * 4
    assert body["link_bytes"] == {"transfer": body["bytes_sent_per_rank"]}
    assert body["exposed_comm_s"] >= 0

    args = parser.parse_args([*words, "--head-dim-v", "4"])
    with pytest.raises(ValueError, match="--head-dim-v"):
        args.run(args)
