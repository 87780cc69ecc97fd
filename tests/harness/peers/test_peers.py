"""Other projects' code beside ours: refusals, the stand-in for flash-attn, and what is broken."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.check.run import check_peers
from harness.errors import UnsupportedError
from harness.measure.cells import measure_cells
from harness.peers import flash_attn_standin
from harness.plan.problem import Direction, Dtype, Problem
from harness.planning import peers
from harness.planning.peers import PEERS, Peer, expanded, peer, refuse
from harness.ranks.team import Member, Team
from harness.records.cell import Status
from harness.records.config import Config, Where
from harness.sweep.limits import Limits
from harness.sweep.suite import Mode, Part
from patterns import make_pattern
from strategies import strategy
from tests.harness.ranks.test_team import ROOT

FEW = Limits(warmup=0, iterations=2)
RUNNING = [name for name, each in PEERS.items() if not each.refusal]
CELL = Config(
    strategy="peer:ring-flash-attn/zigzag",
    pattern="causal",
    cp=2,
    seqlen_q=56,
    seqlen_kv=56,
    heads_q=6,
    heads_kv=2,
    head_dim=24,
    dtype=Dtype.BFLOAT16,
    transport=Where.GLOO,
)


def need(*names: str) -> None:
    for name in names:
        if not PEERS[name].installed:
            pytest.skip(f"{PEERS[name].package} is not installed; {PEERS[name].install}")


# What they cannot do ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "changes", "told"),
    [
        ("ring-flash-attn/ring", {"dtype": Dtype.FLOAT32}, "no copy"),
        ("ring-flash-attn/zigzag", {"pattern": "full"}, "must be causal"),
        ("ring-flash-attn/ring", {"pattern": "window:left=8,right=0"}, "positions start anew"),
        ("ring-flash-attn/ring", {"pattern": "star"}, "full or causal"),
        ("ring-flash-attn/ring", {"seqlen_q": 57, "seqlen_kv": 57}, "try seqlen=56, seqlen=58"),
        ("ring-flash-attn/zigzag", {"seqlen_q": 58, "seqlen_kv": 58}, "2 x cp (4)"),
        ("ring-flash-attn/llama3", {"batch": 2}, "batch"),
        ("ring-flash-attn/ring", {"seqlen_kv": 58, "pattern": "full"}, "seqlen_kv"),
        ("ring-flash-attn/ring", {"cp": 1}, "at least 2"),
        ("yunchang/ulysses", {"cp": 3, "seqlen_q": 57, "seqlen_kv": 57}, "heads (6/2)"),
        ("yunchang/usp-zigzag:2x1", {}, "sends to itself"),
        ("yunchang/usp-zigzag:2x2", {}, "must be cp (2)"),
        ("torch/context-parallel", {}, "CUDA"),
    ],
)
def test_what_a_peer_cannot_do_is_refused_with_the_reason(
    function: str, changes: dict[str, object], told: str
) -> None:
    cell = replace(CELL, strategy=f"peer:{function}", **changes)
    with pytest.raises(UnsupportedError) as refused:
        refuse(peer(cell.strategy), cell.problem)
    assert told in str(refused.value)
    assert cell.strategy in str(refused.value)


@pytest.mark.parametrize("name", RUNNING)
def test_what_it_can_do_is_not_refused(name: str) -> None:
    refuse(peer(name), replace(CELL, strategy=name).problem)


def test_names_are_spelled_out_and_wrong_ones_list_the_choices() -> None:
    def own(text: str) -> tuple[str]:
        return (strategy(text).text,)

    assert expanded(["peer:*", "ring"], own) == (*PEERS, "ring")
    assert expanded(["peer:yunchang/*"], own) == (
        "peer:yunchang/ulysses",
        "peer:yunchang/usp-zigzag",
    )
    assert peer("peer:yunchang/usp-zigzag:2x4").text == "peer:yunchang/usp-zigzag:2x4"
    for wrong in ("peer:none/*", "peer:ring-flash-attn/rings", "peer:ring-flash-attn/ring:2x1"):
        with pytest.raises(ValueError, match="peer"):
            expanded([wrong], own)


def test_the_hybrid_takes_the_largest_head_axis_that_leaves_a_ring() -> None:
    problem = Problem(
        pattern=make_pattern("causal", 96),
        heads_q=12,
        heads_kv=4,
        head_dim=8,
        dtype=Dtype.BFLOAT16,
        cp=8,
    )
    assert peer("peer:yunchang/usp-zigzag").degrees(problem) == (4, 2)
    assert peer("peer:yunchang/usp-zigzag").degrees(replace(problem, cp=2)) == (1, 2)
    assert peer("peer:yunchang/usp-zigzag:2x4").degrees(problem) == (2, 4)


def test_a_peer_has_no_plan() -> None:
    with pytest.raises(UnsupportedError, match="has no plan"):
        strategy("peer:ring-flash-attn/ring")
    part = Part(mode=Mode.MEASURE, strategies=("ring", "peer:*"), dtype=(Dtype.BFLOAT16,))
    assert {cell.strategy for cell in part.cells()} == {"ring", *PEERS}


# The stand-in -------------------------------------------------------------------------------------


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention written out, `(batch, tokens, heads, head_dim)`, aligned at the lower right."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k) * scale
    if causal:
        rows, cols = scores.shape[-2:]
        seen = torch.ones(rows, cols, dtype=torch.bool).tril(cols - rows)
        scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.parametrize(("tokens", "keys", "causal"), [(7, 11, True), (9, 9, True), (7, 5, False)])
def test_the_stand_in_is_attention_with_gradients(tokens: int, keys: int, *, causal: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(2, s, h, 6, generator=draw, dtype=torch.float64, requires_grad=True)
        for s, h in ((tokens, 6), (keys, 3), (keys, 3))
    )
    dout = torch.randn(2, tokens, 6, 6, generator=draw, dtype=torch.float64)
    out, lse = dense(q, k, v, 0.3, causal=causal)
    wanted = torch.autograd.grad(out, (q, k, v), dout)
    with torch.no_grad():
        mine, my_lse, _, _ = flash_attn_standin.forward(q, k, v, 0.0, 0.3, causal)
        grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        flash_attn_standin.backward(dout, q, k, v, mine, my_lse, *grads, 0.0, 0.3, causal)
    by_autograd = flash_attn_standin.flash_attn_func(q, k, v, softmax_scale=0.3, causal=causal)
    for found, right in (
        (mine, out),
        (by_autograd, out),
        (my_lse, lse),
        *zip(grads, wanted, strict=True),
        *zip(torch.autograd.grad(by_autograd, (q, k, v), dout), wanted, strict=True),
    ):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


def test_the_stand_in_keeps_packed_sequences_apart() -> None:
    draw = torch.Generator().manual_seed(4)
    q_ends, k_ends = torch.tensor([0, 4, 9]), torch.tensor([0, 6, 11])
    q, k, v, dout = (
        torch.randn(tokens, heads, 5, generator=draw, dtype=torch.float64)
        for tokens, heads in ((9, 4), (11, 2), (11, 2), (9, 4))
    )
    out, lse, _, _ = flash_attn_standin.varlen_forward(
        q, k, v, q_ends, k_ends, 5, 6, 0.0, 0.4, True
    )
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    flash_attn_standin.varlen_backward(
        dout, q, k, v, out, lse, *grads, q_ends, k_ends, 5, 6, 0.0, 0.4, True
    )
    for rows, cols in ((slice(0, 4), slice(0, 6)), (slice(4, 9), slice(6, 11))):
        own = [x[None].clone().requires_grad_() for x in (q[rows], k[cols], v[cols])]
        right, right_lse = dense(*own, 0.4, causal=True)
        torch.testing.assert_close(out[None, rows], right)
        torch.testing.assert_close(lse[None, :, rows], right_lse)
        wanted = torch.autograd.grad(right, own, dout[None, rows])
        for found, part, want in zip(grads, (rows, cols, cols), wanted, strict=True):
            torch.testing.assert_close(found[None, part], want)


@pytest.mark.parametrize(
    "asked",
    [{"dropout_p": 0.1}, {"window_size": (3, 0)}, {"softcap": 1.0}, {"return_attn_probs": True}],
)
def test_the_stand_in_refuses_what_the_kernel_lacks(asked: dict[str, object]) -> None:
    x = torch.zeros(1, 4, 2, 8)
    with pytest.raises(UnsupportedError):
        flash_attn_standin.flash_attn_func(x, x, x, **asked)


def test_the_stand_in_is_there_only_for_the_import() -> None:
    before = {name: sys.modules.get(name) for name in ("flash_attn", "flash_attn_interface")}
    with flash_attn_standin.standing_in():
        from flash_attn.flash_attn_interface import _flash_attn_forward

        assert _flash_attn_forward is flash_attn_standin.forward
    assert {name: sys.modules.get(name) for name in before} == before
    assert "flash_attn.flash_attn_interface" not in sys.modules


# The packages themselves --------------------------------------------------------------------------


def test_every_peer_equals_the_oracle_on_two_and_four_ranks() -> None:
    need(*RUNNING)
    configs = [
        replace(CELL, strategy=name, cp=cp, heads_q=8, heads_kv=4, pattern=pattern)
        for cp in (2, 4)
        for name in RUNNING
        for pattern in ("causal", "full")
        if pattern == "causal" or not PEERS[name].causal_only
    ]
    cells = [cell for pair in check_peers(configs) for cell in pair]
    assert {cell.status.value for cell in cells} == {"passed"}, [cell.reason for cell in cells]
    for cell in cells:
        names = {"out"} if cell.config.direction is Direction.FORWARD else {"dq", "dk", "dv"}
        assert set(cell.max_rel_error) == names
        assert all(error > 0 for error in cell.max_rel_error.values())


def test_a_sweep_puts_peers_and_ours_into_one_table() -> None:
    name = "peer:ring-flash-attn/ring"
    need(name)
    configs = [
        replace(CELL, strategy=text, direction=direction)
        for direction in Direction
        for text in ("ring", name)
    ]
    for ours, theirs in zip(*[measure_cells(configs, FEW)] * 2, strict=True):
        assert (ours.status, theirs.status) == (Status.OK, Status.OK), theirs.reason
        assert theirs.max_rel_error.keys() == ours.max_rel_error.keys()
        assert (theirs.plan_hash, theirs.bytes_sent_per_rank) == (None, None)


def torch_context_parallel(member: Member) -> str:
    """What torch's own says on a CPU."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn import functional  # the name in it is what gets replaced

    mesh = init_device_mesh("cpu", (member.cp,))
    qkv = [torch.ones(1, 2, 16, 8, dtype=torch.bfloat16) for _ in range(3)]
    try:
        with context_parallel(mesh, buffers=qkv, buffer_seq_dims=[2, 2, 2]):
            functional.scaled_dot_product_attention(*qkv, is_causal=True)
    except NotImplementedError as error:
        return str(error)
    return ""


def test_torchs_own_is_refused_because_it_has_no_rule_for_the_cpu() -> None:
    with Team(2) as team:
        told = team.run(torch_context_parallel, 60)
    assert all("_scaled_dot_product_flash_attention_for_cpu" in text for text in told)


# What is broken or absent -------------------------------------------------------------------------


def fake(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A package of this name that hides the installed one, in this process and in ranks."""
    (folder / "yunchang").mkdir()
    (folder / "yunchang" / "__init__.py").write_text(body)
    (folder / "yunchang" / "globals.py").write_text(
        "class PROCESS_GROUP:\n    ULYSSES_PG = RING_PG = None\n"
        "def set_seq_parallel_pg(*args):\n    pass\n"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{ROOT}")


WRONG = """
import torch
class UlyssesAttention(torch.nn.Module):
    def __init__(self, group):
        super().__init__()
    def forward(self, q, k, v, causal):
        return 0 * q
def local(value, rank, world_size, rd, ud):
    return value.chunk(world_size, dim=1)[rank]
EXTRACT_FUNC_DICT = {"basic": local}
"""


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise RuntimeError('this build is broken')", "this build is broken"),
        (WRONG, "the result of peer:yunchang/ulysses is off"),
    ],
    ids=["raises", "wrong"],
)
def test_a_broken_peer_is_an_error_and_the_sweep_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, told: str
) -> None:
    fake(tmp_path, monkeypatch, body)
    configs = [replace(CELL, strategy=name) for name in ("peer:yunchang/ulysses", "zigzag")]
    broken, ours = measure_cells(configs, FEW)
    assert (broken.status, ours.status) == (Status.ERROR, Status.OK)
    assert told in broken.reason


def test_check_says_that_the_fault_is_the_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path, monkeypatch, WRONG)
    ((forward, backward),) = check_peers([replace(CELL, strategy="peer:yunchang/ulysses")])
    assert forward.status.value == backward.status.value == "failed"
    assert "out of peer:yunchang/ulysses is off" in forward.reason
    assert "the fault is that package's" in forward.reason


def test_an_absent_peer_is_skipped_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda _: None)
    absent, ours = measure_cells([CELL, replace(CELL, strategy="ring")], FEW)
    assert (absent.status, ours.status) == (Status.SKIPPED, Status.OK)
    assert "pip install --no-deps ring-flash-attn==" in absent.reason
    ((forward, backward),) = check_peers([CELL])
    assert forward.status.value == backward.status.value == "refused"


def test_the_harness_imports_where_no_peer_is_installed() -> None:
    code = (
        "import sys\n"
        "for name in ('ring_flash_attn', 'yunchang', 'flash_attn', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "import harness.cli, harness.check.peers, harness.peers.run\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, check=True)


def test_versions_that_are_named_are_those_of_the_lock() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "requirements.lock").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    named: list[Peer] = list(PEERS.values())
    assert {each.version == pins[each.package] for each in named} == {True}
