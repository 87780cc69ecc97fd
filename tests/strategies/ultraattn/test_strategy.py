"""The strategy as a whole: right for any table, no slower than what it improves, kept once."""

import errno
import fcntl
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.cluster.calibration import calibration
from harness.cluster.presets import cluster, measured
from harness.plan.plan import Plan, to_json
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.tasks import legs_of
from harness.planning.levels import Level, read_levels, spell_levels
from harness.planning.strategy import Context
from harness.prepare.planner_context import context_on
from harness.records.defaults import usual
from harness.simulate.simulator import simulate
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import strategy
from strategies.ultraattn import plan_store as keeping
from strategies.ultraattn import strategy as module
from strategies.ultraattn.planner import plan_both
from strategies.ultraattn.planning import PlanningMode
from tests.harness.numeric import table_pattern, wrong
from tests.support import problem

QUICK = "seconds=0.02"
HEADS = ((6, 2), (5, 5), (3, 1))


def both(text: str, p: Problem, context: Context | None = None) -> list[Plan]:
    chosen = strategy(text)
    return [chosen.plan(p, direction, context) for direction in Direction]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    cells = draw(
        st.lists(
            st.lists(st.sampled_from((0, 1, 1, 2)), min_size=columns, max_size=columns),
            min_size=rows,
            max_size=rows,
        )
    )
    heads_q, heads_kv = draw(st.sampled_from(HEADS))
    return Problem(
        pattern=table_pattern(cells, draw(st.integers(1, 41)), draw(st.integers(1, 43))),
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=8,
        batch=draw(st.integers(1, 2)),
        dtype=draw(st.sampled_from((Dtype.FLOAT64, Dtype.FLOAT64, Dtype.BFLOAT16))),
        cp=draw(st.integers(1, 8)),
    )


@pytest.mark.parametrize("name", ["ultraattn", "ultraattn-paper"])
def test_rows_that_attend_to_nothing_may_lie_between_rows_of_one_kernel(name: str) -> None:
    """Results of the first and last chunk are one tensor, and the chunk between them has none."""
    p = replace(problem("full", 3, (6, 2), cp=1), pattern=table_pattern([[1], [0], [1]], 7, 5))
    text = f"{name}:{QUICK},levels=remap+node+device+kernel"
    assert not wrong(*both(text, p, Context(gpus_per_node=1)))


def test_the_ledger_adds_an_output_and_its_lse_part_by_part() -> None:
    """One kernel's result begins one accumulator and adds to another, which is laid out anew."""
    table = table_pattern([[0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 0, 0, 1]], 4, 2)
    p = replace(problem("full", 4, (6, 2), cp=1), pattern=table, dtype=Dtype.BFLOAT16, head_dim=8)
    text = f"ultraattn-paper:{QUICK},levels=remap+node+device+kernel"
    assert not wrong(*both(text, p, Context(gpus_per_node=1)))


@pytest.mark.parametrize("name", ["ultraattn", "ultraattn-paper"])
@pytest.mark.parametrize("pattern", ["causal", "streaming"])
def test_plans_do_not_depend_on_what_is_not_known_when_tokens_are_dealt(
    name: str, pattern: str
) -> None:
    usual = Problem(pattern=make_pattern(pattern, 1027), heads_q=6, heads_kv=2, head_dim=128, cp=4)
    others = {"head_dim": 1, "batch": 2, "dtype": Dtype.FLOAT64, "round_sent": True}
    for one, other in zip(
        both(f"{name}:{QUICK}", usual),
        both(f"{name}:{QUICK}", replace(usual, **others)),
        strict=True,
    ):
        assert (one.q_chunks, one.kv_chunks, one.initial) == (
            other.q_chunks,
            other.kv_chunks,
            other.initial,
        )
        assert one.tasks == other.tasks


levels = st.sets(st.sampled_from(Level)).map(frozenset).map(spell_levels)


@given(problems(), st.sampled_from(("ultraattn", "ultraattn-paper")), levels, st.integers(1, 8))
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
def test_any_table_is_planned_proved_and_right(
    p: Problem, name: str, some: str, gpus_per_node: int
) -> None:
    plans = both(f"{name}:{QUICK},levels={some}", p, Context(gpus_per_node=gpus_per_node))
    assert not wrong(*plans)


@pytest.mark.parametrize("name", ["ultraattn", "ultraattn-paper"])
@pytest.mark.parametrize(("cp", "gpus"), [(2, 8), (6, 3), (8, 2)])
@pytest.mark.parametrize("pattern", ["causal", "strided_original", "window:left=9,right=2"])
def test_patterns_of_all_kinds_are_right_on_one_node_and_several(
    name: str, cp: int, gpus: int, pattern: str
) -> None:
    p = problem(pattern, 101, cp=cp, dims=(8, 6))
    assert not wrong(*both(f"{name}:{QUICK}", p, Context(gpus_per_node=gpus)))


def large(pattern: str, cp: int, heads: int = 2) -> Problem:
    return Problem(
        pattern=make_pattern(pattern, 65536),
        heads_q=heads,
        heads_kv=heads,
        head_dim=128,
        dtype=Dtype.BFLOAT16,
        cp=cp,
    )


def seconds(plan: Plan) -> float:
    return simulate(verify(plan), cluster("h100-8x8")).makespan_s


@pytest.mark.parametrize(("pattern", "cp"), [("star", 8), ("causal", 16)])
def test_it_is_no_slower_than_row_owners(pattern: str, cp: int) -> None:
    p, context = large(pattern, cp), context_on(cluster("h100-8x8"))
    for direction in Direction:
        ours = strategy("ultraattn:seconds=0.1").plan(p, direction, context)
        assert seconds(ours) <= seconds(strategy("owner").plan(p, direction, context))


@pytest.mark.parametrize("pattern", ["star", "streaming"])
def test_it_is_no_slower_than_the_public_codes_rules(pattern: str) -> None:
    """Eight nodes: too many blocks for a search without fixed ones to end within its time."""
    machine = replace(cluster("h100-8x8"), nodes=8, gpus_per_node=2)
    p, context = large(pattern, 16), context_on(machine)
    ours, theirs = (
        sum(
            simulate(verify(plan), machine).makespan_s
            for plan in both(f"{name}:seconds=0.2", p, context)
        )
        for name in ("ultraattn", "ultraattn-paper")
    )
    assert ours <= 1.01 * theirs


def crossing(plan: Plan, gpus: int) -> int:
    legs = [leg for task in plan.tasks for leg in legs_of(task)]
    return sum(leg.src.rank // gpus != leg.dst.rank // gpus for leg in legs)


@pytest.mark.parametrize("nodes", [2, 4])
def test_a_found_remap_leaves_strided_nothing_to_send_between_nodes(nodes: int) -> None:
    p = large("strided_original", 8)
    context = Context(gpus_per_node=8 // nodes)
    found = both(f"ultraattn:{QUICK}", p, context)
    assert [crossing(plan, 8 // nodes) for plan in found] == [0, 0]
    plain = both(f"ultraattn:{QUICK},levels=node+device+kernel+schedule", p, context)
    assert all(crossing(plan, 8 // nodes) for plan in plain)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node+node", "'node' is named twice in 'node\\+node'"),
        ("node+nope", "'nope' is unknown"),
        ("all+node", "'all' must stand alone, as levels=all; or join some of remap, node"),
        ("node+none", "'none' must stand alone, as levels=none"),
    ],
)
def test_levels_are_known_and_named_once(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_levels(text)
    with pytest.raises(ValueError, match=said):
        strategy(f"ultraattn:levels={text}")


def test_without_levels_it_is_the_row_owners_plan() -> None:
    p = problem("causal", 101, cp=4)
    for ours, owners in zip(both("ultraattn:levels=none", p), both("owner", p), strict=True):
        assert ours.tasks == owners.tasks


def test_its_report_names_what_each_level_came_to() -> None:
    p, context = large("causal", 16), context_on(cluster("h100-8x8"))
    chosen = strategy(f"ultraattn:{QUICK},levels=remap+node+device+kernel+schedule")
    report = chosen.strategy.report
    assert report is not None
    said = report(p, Direction.BACKWARD, chosen.options, context)
    assert set(said) >= {"remap", "node", "device", "kernel", "schedule", "makespan_s"}
    assert all(each["bound"] <= each["value"] for each in [said["node"], *said["device"]])
    plan = chosen.plan(p, Direction.BACKWARD, context)
    # A tile that has come to be the first of its accumulator costs a little less than was said.
    assert seconds(plan) == pytest.approx(said["makespan_s"], rel=0.02)


@pytest.mark.parametrize("pattern", ["full", "global_local"])
def test_with_candidates_no_direction_is_slower_than_a_ring(pattern: str) -> None:
    p, context = large(pattern, 8, heads=8), context_on(cluster("h100-8x8"))
    text = f"ultraattn:{QUICK},candidates=true"
    chosen = strategy(text)
    report = chosen.strategy.report
    assert report is not None
    rings = {name: both(name, p, context) for name in ("ring", "zigzag", "stripe")}
    for index, (direction, plan) in enumerate(zip(Direction, both(text, p, context), strict=True)):
        said = report(p, direction, chosen.options, context)
        more = {"ulysses", "allgather:placement=zigzag"}
        assert set(said["candidates_s"]) >= {"ultraattn", *rings, *more}
        assert (said["fallback"] or "ultraattn") in said["candidates_s"]
        assert seconds(plan) <= 1.01 * min(seconds(each[index]) for each in rings.values())


@pytest.mark.parametrize("pattern", ["causal", "star"])
def test_a_calibrated_cluster_judges_by_all_that_it_knows(pattern: str) -> None:
    """Transfers slow the kernels beside them there, which the planner's timeline does not know."""
    p, context = usual(pattern, 8, 16384, 32, 8), context_on(cluster("h100-hamming"))
    assert context.evaluate is not None
    taken = both(f"ultraattn:{QUICK},candidates=true", p, context)
    own, owners = both(f"ultraattn:{QUICK}", p, context), both("owner", p, context)
    for index in range(2):
        seconds_of_rings = [
            context.evaluate(both(name, p, context)[index]) for name in ("ring", "zigzag", "stripe")
        ]
        assert context.evaluate(taken[index]) <= 1.01 * min(seconds_of_rings)
        assert context.evaluate(own[index]) <= 1.01 * context.evaluate(owners[index])


def test_what_a_calibration_likes_best_is_tried_beside_what_the_timeline_does() -> None:
    """One head over long rows: there a tiling's kernels fill the GPU in whole waves, or do not."""
    p, context = usual("global_local", 8, 524288, 1, 1), context_on(cluster("h100-hamming"))
    assert context.evaluate is not None
    own, published = (
        sum(map(context.evaluate, both(text, p, context)))
        for text in (f"ultraattn:{QUICK}", f"ultraattn-paper:{QUICK}")
    )
    assert own < 1.1 * published


def test_a_plan_stays_as_it_is_where_a_calibration_likes_it_best() -> None:
    p, context = usual("streaming", 8, 8192, 6, 2), context_on(cluster("h100-hamming"))
    apart = replace(context, evaluate=lambda plan: 1 / len(plan.tasks))
    mode = PlanningMode(levels=frozenset(Level), seconds=0.02)
    left = plan_both(p, mode, apart)
    assert all(each.report["refined"] is False for each in left.values())
    joined = plan_both(p, mode, replace(context, evaluate=lambda plan: float(len(plan.tasks))))
    assert all(len(joined[d].plan.tasks) < len(left[d].plan.tasks) for d in Direction)


def test_ranks_that_take_turns_keep_their_rows_where_balance_gains_nothing() -> None:
    sheet = calibration("local-cpu").hardware
    fitted = replace(calibration("local-cpu"), hardware=replace(sheet, cores=2))
    p, context = usual("causal", 8, 8192, 8, 8), context_on(measured(fitted))
    assert context.evaluate is not None
    own, owners = (
        sum(map(context.evaluate, both(text, p, context)))
        for text in (f"ultraattn:{QUICK}", "owner")
    )
    assert own <= owners
    alone = context_on(measured(replace(fitted, hardware=replace(sheet, cores=8))))
    assert alone.evaluate is not None
    # With a core each, balance does gain.
    own, owners = (
        sum(map(alone.evaluate, both(text, p, alone))) for text in (f"ultraattn:{QUICK}", "owner")
    )
    assert own < 0.9 * owners


@pytest.mark.parametrize("pattern", ["causal", "star"])
def test_its_own_plans_keep_up_with_rows_dealt_as_a_stripe(pattern: str) -> None:
    """Small shapes, where what a tiling saves is less than what its smaller kernels cost."""
    p, context = large(pattern, 8, heads=1), context_on(cluster("h100-8x8"))
    ours = both(f"ultraattn:{QUICK}", p, context)
    dealt = both("owner:placement=stripe", p, context)
    for mine, simple in zip(ours, dealt, strict=True):
        assert seconds(mine) <= 1.01 * seconds(simple)


def test_a_plan_is_made_once_and_then_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPBENCH_CACHE", str(tmp_path))
    p = problem("star", 83, cp=3)
    module._both.cache_clear()
    first = both(f"ultraattn:{QUICK}", p)

    def never(*_: object) -> None:
        raise RuntimeError("planned again")

    monkeypatch.setattr(module, "plan_both", never)
    module._both.cache_clear()
    assert both(f"ultraattn:{QUICK}", p) == first
    (kept,) = (tmp_path / "plans").glob("*.json")
    whole = kept.read_text()
    _, _, content = whole.partition("\n")
    for spoiled in ("{", "{}", "[3]", whole[:500], content):
        kept.write_text(spoiled)
        module._both.cache_clear()
        with pytest.raises(RuntimeError, match="planned again"):
            both(f"ultraattn:{QUICK}", p)


def test_where_heads_share_keys_it_sends_keys_between_nodes_and_not_queries() -> None:
    """Rows side by side are balanced by queries on the way, which weigh four times as much here."""
    p, context = usual("causal", 16, 524288, 32, 8), context_on(cluster("h100-hamming"))
    for ours, zigzag in zip(
        both(f"ultraattn:{QUICK}", p, context), both("zigzag", p, context), strict=True
    ):
        assert context.evaluate is not None
        assert context.evaluate(ours) <= context.evaluate(zigzag)


def _swapped(whole: str) -> str:
    checksum, _, content = whole.partition("\n")
    found = json.loads(content)
    swapped = {"forward": found["backward"], "backward": found["forward"]}
    return f"{checksum}\n{json.dumps(swapped)}"


def _another_strategys(whole: str) -> str:
    checksum, _, content = whole.partition("\n")
    found = json.loads(content)
    for each, plan in zip(found.values(), both("zigzag", problem("star", 83, cp=3)), strict=True):
        each["plan"] = to_json(plan)
    return f"{checksum}\n{json.dumps(found)}"


def _another_report(whole: str) -> str:
    checksum, _, content = whole.partition("\n")
    found = json.loads(content)
    found["forward"]["report"] = [3]
    return f"{checksum}\n{json.dumps(found)}"


def _deep(whole: str) -> str:
    return whole.partition("\n")[0] + "\n" + "[" * 10**5


def _a_byte(whole: str) -> str:
    return re.sub(r"\[1,", "[2,", whole, count=1)


@pytest.mark.parametrize("edit", [_swapped, _another_strategys, _another_report, _deep, _a_byte])
def test_a_kept_plan_that_was_edited_is_planned_anew_and_mended(
    edit: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPBENCH_CACHE", str(tmp_path))
    p = problem("star", 83, cp=3)
    module._both.cache_clear()
    both(f"ultraattn:{QUICK}", p)
    (kept,) = (tmp_path / "plans").glob("*.json")
    edited = edit(kept.read_text())
    assert edited != kept.read_text()
    kept.write_text(edited)
    module._both.cache_clear()
    forward, backward = both(f"ultraattn:{QUICK}", p)
    assert not wrong(forward, backward)
    report = strategy("ultraattn").strategy.report
    assert report is not None
    options = strategy(f"ultraattn:{QUICK}").options
    assert "makespan_s" in report(p, Direction.FORWARD, options, Context())
    mended = kept.read_text()
    assert mended != edited
    module._both.cache_clear()
    assert both(f"ultraattn:{QUICK}", p) == [forward, backward]
    assert kept.read_text() == mended


@pytest.mark.parametrize("text", [f"ultraattn:{QUICK}", f"ultraattn:{QUICK},candidates=true"])
def test_plans_are_said_to_be_kept_where_they_are(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "strategies")
    p, context = problem("star", 89, cp=3), context_on(cluster("h100-8x8"))
    (tmp_path / "file").write_text("")
    for folder in ("file", "folder"):
        caplog.clear()
        monkeypatch.setenv("CPBENCH_CACHE", str(tmp_path / folder))
        module._both.cache_clear()
        both(text, p, context)
        said = "plan stored in the cache" in caplog.text
        assert said == any((tmp_path / "folder").rglob("plans/*.json"))
        assert said == (f"cannot be stored in {tmp_path / folder / 'plans'} (" not in caplog.text)
    monkeypatch.setattr(keeping, "write_kept", _full)
    monkeypatch.setenv("CPBENCH_CACHE", str(tmp_path / "another"))
    module._both.cache_clear()
    caplog.clear()
    both(text, p, context)
    assert "plan stored in the cache" not in caplog.text
    assert f"cannot be stored in {tmp_path / 'another' / 'plans'} (No space left" in caplog.text


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_who_waits_for_another_process_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "strategies")
    monkeypatch.setenv("CPBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(keeping, "_SILENT_S", 0.02)
    (tmp_path / "plans").mkdir()
    other = (tmp_path / "plans" / "key.lock").open("w")
    fcntl.flock(other, fcntl.LOCK_EX)

    def release() -> None:
        for _ in range(500):
            if "waiting for another process" in caplog.text:
                break
            time.sleep(0.01)
        other.close()

    thread = Thread(target=release)
    thread.start()
    assert keeping.kept("ultraattn", "key", lambda: {"a": 1}, dict) == {"a": 1}
    thread.join()
    assert f"with the same plan ({tmp_path / 'plans' / 'key.lock'})" in caplog.text


@pytest.mark.parametrize(
    ("pattern", "blocks", "cap"), [("causal", 10, 2 * 4 * 64), ("global_local", 4, 2 * (23 + 1))]
)
def test_the_public_codes_nodes_weigh_blocks_by_their_area(
    pattern: str, blocks: int, cap: int
) -> None:
    """As it does: four chunks on 2 nodes if causal, else two, and a block more than even."""
    chosen = strategy(f"ultraattn-paper:{QUICK},levels=node+device")
    report = chosen.strategy.report
    assert report is not None
    p, context = large(pattern, 16), context_on(cluster("h100-8x8"))
    said = report(p, Direction.FORWARD, chosen.options, context)["node"]
    assert (said["blocks"], said["cap"]) == (blocks, cap)


def test_a_pattern_that_allows_nothing_is_planned() -> None:
    p = replace(problem("causal", 33, cp=3), pattern=table_pattern([[0, 0], [0, 0]], 33, 33))
    assert not wrong(*both(f"ultraattn:{QUICK}", p))
    assert not wrong(*both(f"ultraattn-paper:{QUICK}", p, Context(gpus_per_node=1)))


def test_a_folder_that_cannot_be_written_keeps_nothing_and_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("CPBENCH_CACHE", str(file / "under"))
    module._both.cache_clear()
    forward, backward = both(f"ultraattn:{QUICK}", problem("star", 85, cp=3))
    assert not wrong(forward, backward)


def _hashes(folder: str, seed: int, queue: "multiprocessing.Queue[tuple[str, ...]]") -> None:
    os.environ["CPBENCH_CACHE"] = folder
    np.random.default_rng(seed)
    p = problem("causal", 211, cp=4)
    queue.put(tuple(plan.hash for plan in both("ultraattn:seconds=0.1", p)))


def test_a_key_is_equal_in_processes_that_hash_differently() -> None:
    code = (
        "from harness.cluster.presets import cluster\n"
        "from harness.planning.levels import ALL_LEVELS\n"
        "from strategies.ultraattn.plan_store import plan_key\n"
        "from strategies.ultraattn.planning import PlanningMode\n"
        "print(plan_key(mode=PlanningMode(levels=ALL_LEVELS), cluster=cluster('h800')))"
    )
    keys = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in range(4)
    }
    assert len(keys) == 1


def test_processes_that_plan_at_once_come_to_one_plan(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[tuple[str, ...]] = context.Queue()
    ranks = [
        context.Process(target=_hashes, args=(str(tmp_path), seed, queue)) for seed in range(3)
    ]
    for rank in ranks:
        rank.start()
    found = {queue.get(timeout=120) for _ in ranks}
    for rank in ranks:
        rank.join()
    assert len(found) == 1


@pytest.mark.parametrize("text", ["all", "none", "device", "node+device", "remap+kernel+schedule"])
def test_levels_are_read_and_spelled(text: str) -> None:
    assert spell_levels(read_levels(text)) == text


def test_an_unknown_level_lists_the_choices() -> None:
    with pytest.raises(ValueError, match="'gpu' is unknown; join some of remap, node, device"):
        read_levels("gpu+node")
