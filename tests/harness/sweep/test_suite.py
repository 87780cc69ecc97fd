"""Suites: what they hold, and what is said about each mistake in one."""

from pathlib import Path

import pytest

from harness.commands.sweep import _AXES as AXES
from harness.records.config import Where
from harness.sweep import suite
from harness.sweep.suite import Mode, Part
from strategies import DIRECT, STRATEGIES, strategy

PART = '[[part]]\nmode = "simulate"\n'


def load(folder: Path, text: str) -> tuple[Part, ...]:
    (folder / "mine.toml").write_text(text)
    return suite.load_suite(str(folder / "mine.toml"), AXES)


def test_a_suite_is_the_product_of_its_values(tmp_path: Path) -> None:
    (part,) = load(
        tmp_path,
        PART
        + 'strategies = ["ring", "p2p", "usp:2x2"]\ncp = [4, 8]\nseqlen = ["64k"]\n'
        + 'heads = ["32/8", "6/2"]\ndirection = ["backward"]\ncluster = ["h100-1x8"]\n',
    )
    cells = list(part.cells())
    assert len(cells) == 2 * 2 * 2  # p2p is ring
    assert {cell.strategy for cell in cells} == {"ring", "usp:2x2"}
    assert {cell.seqlen_kv for cell in cells} == {65536}
    assert {cell.transport for cell in cells} == {Where.SIMULATED}


def test_a_measured_part_runs_on_this_machine() -> None:
    cells = list(Part(mode=Mode.MEASURE).cells())
    assert {(cell.transport, cell.cluster) for cell in cells} == {(Where.GLOO, None)}
    assert {cell.strategy for cell in cells} >= set(STRATEGIES)


def test_direct_is_all_that_do_not_search() -> None:
    cells = Part(mode=Mode.MEASURE, strategies=("direct",)).cells()
    assert {cell.strategy for cell in cells} == set(STRATEGIES) & set(DIRECT)


FOR_PACKS = {"dynamic", "hypergraph"}
"""No pattern of the quick suite has documents, and the second takes long to plan for 64 ranks."""


def test_the_quick_suite_has_all_strategies_six_patterns_and_both_sources() -> None:
    cells = [cell for part in suite.load_suite("quick", AXES) for cell in part.cells()]
    simulated = [cell for cell in cells if cell.cluster == "h100-hamming"]
    measured = [cell for cell in cells if cell.cluster is None]
    for some in (simulated, measured):
        names = {strategy(cell.strategy).strategy.name for cell in some}
        assert names == set(STRATEGIES) - FOR_PACKS
    assert len({cell.pattern for cell in simulated}) == 6
    assert {cell.cp for cell in simulated} == {8, 16, 32, 64}
    assert {cell.cp for cell in measured} == {2, 4}
    assert {65536, 524288} <= {cell.seqlen_q for cell in simulated}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not toml", "is not TOML"),
        ("", r"must be a list of \[\[part\]\] tables"),
        ("part = 3", r"must be a list of \[\[part\]\] tables"),
        ("part = [3]", r"must be a list of \[\[part\]\] tables"),
        (PART + "[other]", r"must be a list of \[\[part\]\] tables"),
        ("[[part]]\ncp = [4]", "needs mode = simulate or measure"),
        ('[[part]]\nmode = "guess"', r"mode \(guess\) must be simulate or measure"),
        ('[[part]]\nmode = "both"', r"mode \(both\) must be simulate or measure"),
        (PART + "ranks = [4]", r"key \(ranks\) is unknown; use mode, strategies, .*cluster"),
        (PART + "cp = 4", "cp must be a list"),
        (PART + "cp = []", "cp must be a list"),
        (PART + "cp = [0]", r"cp: \(0\) must be a whole number of at least 1"),
        (PART + 'seqlen = ["x"]', r"seqlen: length \(x\) must be like 1000, 64k or 1m"),
        (PART + 'heads = ["5/3"]', r"heads: heads \(5/3\): query heads must be a multiple"),
        (PART + 'dtype = ["int8"]', r"dtype: dtype \(int8\) is unknown; choose float64"),
        (PART + 'direction = ["up"]', r"direction: \(up\) is unknown; choose forward, backward"),
    ],
)
def test_a_mistake_in_a_suite_is_named_with_the_choices(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(tmp_path, text)


def test_suites_that_are_not_there_are_named_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"suite \(fast\) is unknown; choose from .*quick"):
        suite.load_suite("fast", AXES)
    with pytest.raises(ValueError, match=r"no.toml\) does not exist"):
        suite.load_suite(str(tmp_path / "no.toml"), AXES)
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ValueError, match="cannot be read"):
        suite.load_suite(str(tmp_path / "folder.toml"), AXES)
