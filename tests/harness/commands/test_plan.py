"""The verb `plan`: grid, JSON, saving, loading, and what a wrong saved plan does."""

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from harness import cli
from harness.cluster.presets import DEFAULT_CLUSTER
from harness.commands import plan as verb
from harness.errors import UnsupportedError
from harness.plan.grid import grid
from harness.plan.plan import Plan, to_json
from harness.plan.problem import Direction, Problem
from harness.plan.reader import from_json
from harness.plan.sizes import tile_flops
from harness.plan.tasks import Tile
from patterns import make_pattern
from strategies import STRATEGIES, quick, strategy

SMALL = ["--cp", "4", "--seqlen", "64", "--heads-q", "4", "--heads-kv", "2", "--head-dim", "16"]


def call(*words: str) -> int:
    parser = argparse.ArgumentParser()
    verb.register(parser.add_subparsers())
    args = parser.parse_args(["plan", *words])
    status: int = args.run(args)
    return status


def made(name: str, direction: Direction = Direction.FORWARD, cp: int = 4) -> Plan:
    problem = Problem(pattern=make_pattern("causal", 64), heads_q=4, heads_kv=2, head_dim=16, cp=cp)
    return strategy(name).plan(problem, direction)


@pytest.mark.parametrize("direction", list(Direction))
def test_the_grid_and_a_summary_are_printed(
    direction: Direction, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--dtype", "float32", "--direction", direction.value]
    assert call("--strategy", "zigzag", *SMALL, *words) == 0
    captured = capsys.readouterr()
    plan = made("zigzag", direction)

    assert captured.out.startswith(str(plan))
    assert plan.hash in captured.out
    tiles = sum(isinstance(task, Tile) for task in plan.tasks)
    assert f"{tiles} tile" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize("name", [quick(name) for name in STRATEGIES])
@pytest.mark.parametrize("direction", list(Direction))
def test_a_saved_plan_comes_back_equal(
    name: str, direction: Direction, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    words = [*SMALL, "--direction", direction.value, "--json"]
    assert call("--strategy", name, *words, "-o", str(file)) == 0
    first = json.loads(capsys.readouterr().out)
    assert call("--load", str(file), "--json") == 0
    second = json.loads(capsys.readouterr().out)

    levels = first.pop("levels")  # of the planning, so a plan that is read has none
    assert second.pop("levels") == {}
    assert second == first
    assert first["plan_hash"] == from_json(file.read_text()).hash
    assert bool(levels) == (strategy(name).strategy.report is not None)
    assert len(first["tasks"]) == sum(first["summary"]["tasks"].values())


def test_the_json_summary_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--strategy", "ring", *SMALL, "--dtype", "float32", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    time = found["time"]
    assert time["cluster"] == DEFAULT_CLUSTER
    assert sum(time["terms_s"].values()) == pytest.approx(time["time_s"], rel=1e-12)
    assert 0 < time["any_plan_bound_s"] <= time["plan_bound_s"] <= time["time_s"]
    plan = made("ring")
    flops = sum(tile_flops(plan, task) for task in plan.tasks if isinstance(task, Tile))

    # Causal: each rank sends k and v of 16 tokens and 2 heads on, but not past the last rank.
    hop = 2 * 16 * 2 * 16 * 4
    assert sum(found["summary"]["sent_bytes"]) == (3 + 2 + 1) * hop
    assert sum(found["summary"]["area_times_heads"]) * 4 * 16 == flops
    assert sum(found["summary"]["area_times_heads"]) == 4 * 64 * 65 // 2
    assert min(found["summary"]["peak_bytes"]) > 0


def test_a_wrong_saved_plan_exits_with_1_and_shows_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = made("ring")
    at = next(i for i, task in enumerate(plan.tasks) if isinstance(task, Tile))
    tile = plan.tasks[at]
    assert isinstance(tile, Tile)
    wrong = replace(
        plan,
        tasks=(*plan.tasks[:at], replace(tile, area=tile.area + 1), *plan.tasks[at + 1 :]),
    )
    file = tmp_path / "wrong.json"
    file.write_text(to_json(wrong))

    assert call("--load", str(file), "--json") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"task {at}" in captured.err
    assert grid(wrong, mark=at) in captured.err


@pytest.mark.parametrize("text", ["", "{}", "[]", "nothing", '{"schema": 1}', '{"schema": 2}'])
def test_a_file_that_holds_no_plan_is_a_wrong_call(text: str, tmp_path: Path) -> None:
    file = tmp_path / "no.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"--load .*no\.json"):
        call("--load", str(file))


WRONG = {
    ("problem", "head_dim"): [1.5, True, "24", None, 0],
    ("problem", "head_dim_v"): [-8],
    ("problem", "batch"): [True, -1],
    ("problem", "heads_q"): [10**12],
    ("problem", "hidden"): ["64", 10**12],
    ("problem", "cp"): [2.5, 1000000, 1025, 0],
    ("problem", "rotary"): [True],
    ("problem", "round_sent"): [1],
    ("problem", "pattern"): [["causal"]],
    ("problem", "dtype"): ["float3"],
    ("problem",): [[], 3],
    ("schema",): [True, 2],
    ("strategy",): [{"a": 1}, None],
    ("direction",): ["sideways"],
    ("initial", 0, 1, "heads"): [-1, 0, 1.0],
    ("initial", 0, 1, "chunks"): [[-1], [0.0], 3],
    ("initial", 0, 1, "version"): [0.5],
    ("initial", 0, 0, "rank"): [-1, "0", 1.5],
    ("initial", 0, 0, "memory"): ["disk", ["host"]],
    ("initial", 0): [[], 3],
    ("q_chunks", 1, "start"): [-1, 0.5],
    ("q_chunks", 1, "step"): [0, -1],
    ("tasks",): [{}, 3],
    ("tasks", 0): [[], 3, ["tile"], [["tile"]], ["sleep", 3]],
    ("outputs", 0, 1, "tensor"): ["qkv", 3, ["q"]],
    ("saved",): [None],
}
"""Of fields of a plan, values that none can have. Places in a list have names in messages."""
PLACES = {"rank": 0, "memory": 1, "start": 0, "step": 2}
PLACES |= {"tensor": 0, "chunks": 1, "heads": 2, "version": 3}


@pytest.mark.parametrize(
    ("way", "value"), [(way, value) for way, values in WRONG.items() for value in values]
)
def test_a_field_that_no_plan_has_is_a_wrong_call_that_names_it(
    way: tuple[str | int, ...], value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = json.loads(to_json(made("zigzag")))
    *above, last = way
    inner = body
    for name in above:
        inner = inner[name]
    inner[last if isinstance(inner, dict) else PLACES.get(last, last)] = value
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(body))
    assert cli.main(["plan", "--load", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    said = " ".join(captured.err.split())
    assert f"--load ({file}) holds no plan of schema 1: " in said
    assert str(last if isinstance(last, str) else way[-2]) in said
    if isinstance(value, int | float | str):
        assert repr(value).strip("'") in said


def test_an_entry_of_a_task_is_named_by_the_way_to_it(tmp_path: Path) -> None:
    body = json.loads(to_json(made("zigzag")))
    at = next(index for index, task in enumerate(body["tasks"]) if task[0] == "tile")
    body["tasks"][at][3][2][2] = -1
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(body))
    with pytest.raises(ValueError, match=rf"tasks\[{at}\]\.reads\[2\]\.heads \(-1\) must be"):
        call("--load", str(file))


@pytest.mark.parametrize("text", ["[" * 200_000, '{"schema":' * 200_000])
def test_a_file_nested_too_deeply_is_a_wrong_call(text: str, tmp_path: Path) -> None:
    file = tmp_path / "deep.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"deep\.json.*nested too deeply"):
        call("--load", str(file))


def test_a_field_that_is_missing_or_unknown_is_named(tmp_path: Path) -> None:
    file = tmp_path / "short.json"
    whole = json.loads(to_json(made("ring")))
    for above, name in ((whole, "tasks"), (whole["problem"], "seqlen_kv")):
        value = above.pop(name)
        file.write_text(json.dumps(whole))
        with pytest.raises(ValueError, match=f"lacks {name}"):
            call("--load", str(file))
        above[name] = value
    file.write_text(json.dumps({**whole, "heads": 3}))
    with pytest.raises(ValueError, match=r"a field of plan \('heads'\) must be one of schema, "):
        call("--load", str(file))
    del whole["problem"]["batch"]  # a problem has one as a rule
    file.write_text(json.dumps(whole))
    assert call("--load", str(file)) == 0


def test_a_missing_file_and_a_folder_that_is_not_there_are_wrong_calls(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        call("--load", str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match="--output"):
        call(*SMALL, "-o", str(tmp_path / "none" / "plan.json"))
    assert list(tmp_path.iterdir()) == []


def test_what_a_strategy_refuses_is_its_own_error() -> None:
    with pytest.raises(UnsupportedError, match="heads_q"):
        call("--strategy", "ulysses", *SMALL, "--cp", "8")


def test_a_grid_is_cut_to_whole_steps_and_ranks_with_a_hint() -> None:
    text = str(made("ring", cp=8))
    assert verb.cut_grid(text, 10_000, 10_000) == text
    cut = verb.cut_grid(text, 80, 12)
    shown, hint = cut.split("\n(")
    shown = shown.splitlines()

    assert max(map(len, shown)) <= 80
    assert len(shown) <= 2 + 12
    assert all(line in whole for line, whole in zip(shown, text.splitlines(), strict=False))
    assert "step 2" in shown[1]
    assert "step 3" not in shown[1]
    ranks = [line[:5].strip() for line in shown[2:] if line[:5].strip()]
    assert ranks == [str(rank) for rank in range(len(ranks))]
    assert f"3 of 8 steps and {len(ranks)} of 8 ranks" in hint
    assert max(map(len, hint.splitlines())) <= 80


def test_a_step_is_as_wide_as_its_longest_cell_and_chunks_in_a_row_are_a_range() -> None:
    text = str(made("usp:4x2", cp=8))
    assert "q0-7·k0-7" in text
    assert ",1,2," not in text
    wide = str(made("ultraattn-paper:seconds=0.05", cp=4))
    begins = [match.start() for match in re.finditer("step", text.splitlines()[1])]
    assert all(line[at - 1 : at] in ("", " ") for line in text.splitlines()[2:] for at in begins)
    assert max(map(len, verb.cut_grid(wide, 60, 99).splitlines())) <= 60


def test_a_grid_too_large_for_any_cut_still_shows_one_step_and_rank() -> None:
    cut = verb.cut_grid(str(made("ring", cp=8)), 1, 1)

    assert "(1 of 8 steps and 1 of 8 ranks" in " ".join(cut.split())


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call("--help")
    assert "  python -m harness plan --strategy zigzag" in capsys.readouterr().out


def test_blocks_are_shown_by_rank_with_every_ranks_account(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call("--strategy", "owner", *SMALL, "--show", "table") == 0
    printed = capsys.readouterr().out
    assert re.search(r"q3 @3 +3 +3 +3 +3\n", printed)
    assert re.match(r" +k( \d+)+\n +@( \d+)+\n", printed)
    assert re.search(r"^ +0 +0 +0 +0 +3 ", printed, re.MULTILINE)  # k0 goes to three others
    assert "received MiB" in printed


def test_a_timeline_and_the_levels_of_a_planner_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiled = "ultraattn:seconds=0.02,levels=remap+node+device+kernel+schedule"
    words = ["--strategy", tiled, *SMALL, "--pattern", "star"]
    assert call(*words, "--show", "timeline") == 0
    # A calibration may find so small a plan as fast as it is; a datasheet never does.
    printed = capsys.readouterr().out
    assert re.search(r"^(refined +no:|schedule )", printed, re.MULTILINE)
    said = re.search(r"^timeline +[0-9.]+ ms by the planner's own timeline on", printed, re.M)
    assert said, "a time is printed whether or not the plan was scheduled"
    assert "h100-hamming, without the calibration's further effects" in " ".join(printed.split())
    words += ["--cluster", "h100-8x8"]
    assert call(*words, "--show", "timeline") == 0
    printed = capsys.readouterr().out
    assert "compute" in printed
    assert re.search(r"^schedule +[0-9.]+ ms by that timeline, lower bound", printed, re.MULTILINE)
    assert re.search(r"^planned for +h100-8x8, 8 GPUs a node$", printed, re.MULTILINE)
    assert re.search(r"^planned as +for bfloat16, head_dim 128, batch 1", printed, re.MULTILINE)
    assert "calibration" not in printed
    assert call(*words, "--json") == 0
    levels = json.loads(capsys.readouterr().out)["levels"]
    assert set(levels) >= {"remap", "kernel", "schedule", "makespan_s"}
    assert call("--strategy", "ring", *SMALL, "--json") == 0
    assert json.loads(capsys.readouterr().out)["levels"] == {}
