"""Run scripts/validate_predictor.py on small tables of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.ranks.test_team import ROOT

DENSE = (
    "gpu,nodes,gpus_per_node,Sq,Skv,heads,head_dim,bs,pattern,direction,strategy,kernel_tile,"
    "scheduler,Y,X,mode,time_s,hfu_tflops_per_gpu,source_id\n"
)
SPARSE = (
    "gpu,nodes,gpus_per_node,S,heads,head_dim,bs,pattern,direction,strategy,allocation,"
    "kernel_tile,scheduler,time_s,author_predicted_s,source_pdf\n"
)


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "scripts" / "validate_predictor.py"
    command = [sys.executable, str(script), "--data", str(folder), "--jobs", "1", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "dense.csv").write_text(
        DENSE
        + "H800,1,8,24576,8192,3,128,1,full,fwd,ultra,0,manual,4,2,normal,0.001,1,L00\n"
        + "H800,1,8,24576,8192,3,128,1,full,fwd,ultra,0,manual,4,2,normal,0.002,1,L00\n"
        + "A800,3,5,15360,15360,7,128,1,causal,bwd,zigzag,,,,,normal,0.01,1,L02\n"
        + "A100,1,8,8192,8192,1,128,1,full,fwd,ultra,0,manual,3,2,normal,0.01,1,L03\n"
        + "B200,1,8,8192,8192,1,128,1,full,fwd,ring,,,,,normal,0.01,1,L99\n"
        + "H800,1,8,8192,8192,1,128,1,full,fwd,tree,,,,,normal,0.01,1,L99\n"
        + "H800,1,8,8192,8192,1,128,1,full,fwd,ring,,,,,normal,fast,1,L99\n"
        + "H800,8,1,8192,8192,1,128,1,full,fwd,ring,,,,,normal,0.01,1,L17\n"
        + "H800,1,8,8192,8192,1,128,1,full,fwd,ultra,1,bfs,,,normal,0.01,1,L00\n"
        + "H800,1\n"
        + "H800,1,8,8192,8192,1,128,1,full,fwd,ring,,,,,normal,nan,1,L99\n"
        + "H800,1,8,8192,8192,1,64,1,full,fwd,ring,,,,,normal,0.01,1,L99\n"
        + "H800,1,8,8192,8192,1,128,1,full,fwd,ring,,,,,sleepy,0.01,1,L99\n"
        + "H800,1,6000,8192,8192,1,128,1,full,fwd,ring,,,,,normal,0.01,1,L99\n"
    )
    (tmp_path / "sparse.csv").write_text(
        SPARSE
        + "H100,1,8,65536,5,128,1,streaming,fwd,ultra,node_tile,0,bfs,0.004,0.0038,x\n"
        + "H100,1,2,16384,3,128,1,star,fwd,ultra,device_tile,1,ilp,0.004,0.0038,x\n"
        + "H100,2,4,65536,3,128,1,global_local,bwd,ultra,node_tile,0,bfs,0.004,,x\n"
        + "H100,1,8,65536,5,128,1,streaming,fwd,ultra,row_tile,0,bfs,0.004,0.0038,x\n"
        + "H100,1,8,65536,5,128,1,spiral,fwd,ring,,,,0.004,,x\n"
        + "H100,9,8,65536,5,128,1,streaming,fwd,ultra,node_tile,0,bfs,0.004,0.0038,x\n"
        + "H100,1,3,65536,5,128,1,streaming,fwd,ultra,node_tile,0,bfs,0.004,0.0038,x\n"
        + "H100,1,8,65536,5,128,1,streaming,fwd,ring\n"
    )
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    return tmp_path


def test_every_row_is_predicted_or_counted_with_its_reason(folder: Path) -> None:
    done = run(folder, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["sets"]
    named = {(r["gpu"], r["nodes"], r["pattern"], r["direction"], r["strategy"]): r for r in rows}
    assert set(named) == {
        ("A800", 3, "causal", "bwd", "zigzag"),
        ("H100", 1, "star", "fwd", "ultraattn"),
        ("H100", 1, "streaming", "fwd", "owner"),
        ("H100", 2, "global_local", "bwd", "owner"),
        ("H800", 1, "full", "fwd", "grid"),
    }
    grid = named["H800", 1, "full", "fwd", "grid"]
    assert grid["n"] == 2
    # One prediction p against 1 and 2 ms: signed error p/2 (1 + 1/2) - 1.
    p = (grid["signed"] + 1) / 0.75
    assert grid["mape"] == pytest.approx((abs(p - 1) + abs(p / 2 - 1)) / 2)
    assert named["H100", 1, "streaming", "fwd", "owner"]["author_mape"] == pytest.approx(0.05)
    for reason in (
        "a grid of 3 rows does not fit 8 GPUs",
        "no calibration of B200",
        "strategy tree does not exist",
        "cannot be read: ValueError",
        "8 nodes of 1 GPU",
        "allocation of blocks to GPUs is unknown",
        "pattern spiral does not exist",
        "strategy (none) does not exist here; ultra, ring, zigzag, stripe do",
        "cannot be read: times, lengths, heads and GPUs must be positive and finite",
        "cannot be read: ValueError: head_dim (64) must be 128",
        "mode sleepy does not exist here; normal, nocomm, nocomp do",
        "6000 GPUs are more than 1024",
        "72 GPUs are more than 64",
        "8 chunks of pattern streaming do not divide by 3 GPUs",
        "cannot be read: it ends before its last column",
    ):
        assert f"1: {reason}" in done.stderr.replace("there is ", "").replace("the ", "").replace(
            "row ", ""
        ), done.stderr


def test_a_folder_without_tables_is_a_wrong_call(tmp_path: Path) -> None:
    for folder, why in ((tmp_path, "it holds no *.csv"), (tmp_path / "no", "it is no folder")):
        done = run(folder)
        assert done.returncode == 2
        assert "must hold tables of measured runs" in done.stderr
        assert why in done.stderr
    (tmp_path / "a.csv").write_text(DENSE)
    (tmp_path / "b.csv").write_text("gpu,nodes,gpus_per_node,heads,direction,strategy\n" + "1," * 5)
    done = run(tmp_path)
    assert done.returncode == 2
    assert "a.csv has no rows; b.csv lacks the columns time_s" in done.stderr


def test_a_table_may_begin_with_a_mark_and_hold_bytes_that_are_no_text(tmp_path: Path) -> None:
    row = "A800,1,8,15360,15360,7,128,1,causal,bwd,ring,,,,,normal,0.01,1,L02\n"
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + (DENSE + row).encode() + b"A800,\xff\xfe\n")
    done = run(tmp_path, "--json")
    assert [r["n"] for r in json.loads(done.stdout)["sets"]] == [1]
    assert "skipped      1" in done.stderr


def test_sequences_side_by_side_are_heads(tmp_path: Path) -> None:
    row = "A800,1,8,15360,15360,{},128,{},causal,bwd,ring,,,,,normal,0.01,1,L02\n"
    found = []
    for heads, batch in ((6, 1), (3, 2), (3, 1)):
        (tmp_path / "a.csv").write_text(DENSE + row.format(heads, batch))
        found.append(json.loads(run(tmp_path, "--json").stdout)["sets"][0]["signed"])
    assert found[0] == found[1] > found[2]


def test_half_of_the_shapes_can_be_left_out(folder: Path) -> None:
    whole, half = (
        json.loads(run(folder, "--json", *w).stdout)["sets"] for w in ((), ("--holdout",))
    )
    assert sum(r["n"] for r in half) < sum(r["n"] for r in whole)


def test_how_often_the_predicted_best_is_best_is_counted_by_gpu(tmp_path: Path) -> None:
    # Zigzag has half of a ring's longest work; the second cell's times say otherwise.
    row = "A800,1,4,524288,524288,4,128,1,causal,{},{},,,,,normal,{},1,L02\n"
    told = [("fwd", "ring", 2.0), ("fwd", "zigzag", 1.0), ("bwd", "ring", 1.0)]
    told += [("bwd", "zigzag", 1.04), ("bwd", "zigzag", 9.0)]
    (tmp_path / "dense.csv").write_text(DENSE + "".join(row.format(*cell) for cell in told))
    assert "A800: the best of ring, zigzag and stripe" in run(tmp_path).stdout
    assert "predicted in 1 of 2 cells" in run(tmp_path).stdout
    near = run(tmp_path, "--markdown").stdout
    assert "| A800, 1 | " in near
    assert "| A800 flash-attn-2 | 1 | causal | bwd | zigzag | 2 | " in near
    assert "| A800 flash-attn-2, 1 nodes | 2 | 2.0% | 4.0% | 1 | " in near
    (tmp_path / "dense.csv").write_text(
        DENSE + "".join(row.format(*cell) for cell in [*told, ("bwd", "zigzag", 1.02)])
    )
    assert "predicted in 2 of 2 cells" in run(tmp_path).stdout
