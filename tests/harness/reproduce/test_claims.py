"""Claims: data that names its source, figures of ours that are computed anew, and verdicts."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from harness.commands import reproduce as verb
from harness.measure.small_claims import small_configs, small_runs_of
from harness.reproduce import claims as module
from harness.reproduce.claims import (
    Claim,
    ClaimVerdict,
    JudgedClaim,
    Ours,
    claims_in,
    published_file,
    source_names,
)
from harness.reproduce.kept_verdicts import counts_of, kept_claim
from harness.reproduce.kinds import KINDS, Provenance, claims_of, judged_claim
from harness.reproduce.sums import computed_sum


def call(*words: str) -> int:
    parser = argparse.ArgumentParser()
    verb.register(parser.add_subparsers())
    args = parser.parse_args(["reproduce", *words])
    status: int = args.run(args)
    return status


def every_claim() -> Iterator[Claim]:
    for name in source_names():
        yield from claims_of(name)


CLAIM = Claim(
    source="s",
    table="t",
    what="w",
    published=100.0,
    unit="",
    where="p",
    read="r",
    tolerance=0.05,
    absolute=False,
    reason="",
    kind="sum",
    setting={"formula": "100"},
    missing="",
    why="",
    seen="",
)


def judged(ours: Ours | None, **changes: object) -> JudgedClaim:
    return JudgedClaim(claim=replace(CLAIM, **changes), ours=ours)


def test_every_figure_has_a_source_a_place_in_it_and_what_its_kind_needs() -> None:
    claims = list(every_claim())
    keys = [claim.key for claim in claims]
    assert len(set(keys)) == len(keys)
    assert len(claims) >= 250
    assert len(source_names()) >= 14
    for claim in claims:
        assert claim.where
        assert claim.read
        assert bool(claim.kind) != bool(claim.missing), claim.key
        assert not claim.kind or claim.kind in KINDS
        assert not claim.kind or claim.reason or claim.published is None, claim.key


def test_a_verdict_is_by_the_tolerance_and_an_advantage_by_equal_ground_too() -> None:
    assert judged(Ours(value=105)).verdict is ClaimVerdict.REPRODUCED
    assert judged(Ours(value=94.9)).verdict is ClaimVerdict.NOT_REPRODUCED
    assert judged(Ours(value=101, fair=95)).verdict is ClaimVerdict.REPRODUCED
    assert judged(Ours(value=101, fair=94)).verdict is ClaimVerdict.BASELINE_ONLY
    assert judged(Ours(value=120, fair=130)).verdict is ClaimVerdict.NOT_REPRODUCED
    assert judged(None).verdict is ClaimVerdict.NOT_CHECKABLE
    assert judged(Ours(value=105), published=None).verdict is ClaimVerdict.NOT_CHECKABLE
    exact = {"tolerance": 0.0, "published": 20.0}
    assert judged(Ours(value=20), **exact).verdict is ClaimVerdict.REPRODUCED
    assert judged(Ours(value=20.001), **exact).verdict is ClaimVerdict.NOT_REPRODUCED
    zero = {"tolerance": 0.5, "published": 0.0, "absolute": True}
    assert judged(Ours(value=0.5), **zero).verdict is ClaimVerdict.REPRODUCED
    assert judged(Ours(value=-0.6), **zero).verdict is ClaimVerdict.NOT_REPRODUCED


def test_without_a_tolerance_the_predictors_expected_error_judges_or_nothing_does() -> None:
    known = Ours(value=108, expected_error=0.09)
    assert judged(known, tolerance=None).verdict is ClaimVerdict.REPRODUCED
    assert judged(replace(known, value=110), tolerance=None).verdict is ClaimVerdict.NOT_REPRODUCED
    assert judged(Ours(value=100), tolerance=None).verdict is ClaimVerdict.NOT_CHECKABLE


def test_what_can_be_computed_quickly_has_the_verdict_that_was_kept() -> None:
    """A wrong figure in a file is told here: ours is computed anew, and the verdict changes."""
    quick = [c for c in every_claim() if c.kind and KINDS[c.kind].quick]
    assert len(quick) > 130
    for claim in quick:
        kept, now = kept_claim(claim), judged_claim(claim)
        assert kept is not None, f"{claim.key}: another figure than that of the last run"
        assert now.verdict is kept.verdict, f"{claim.key}: {now.ours}"


@pytest.mark.parametrize(
    ("source", "wrong", "right"),
    [
        ("article-cp-ulysses", '["ring", "32/8", 448]', '["ring", "32/8", 484]'),
        ("article-ultraattn", '["least possible", "least_traffic", [], 4]', "4 is 5"),
        ("deepspeed-ulysses", "[32, 4]", "[32, 6]"),
    ],
)
def test_a_wrong_figure_typed_into_a_file_is_told(
    monkeypatch: pytest.MonkeyPatch, source: str, wrong: str, right: str
) -> None:
    file = module.FOLDER_OF_CLAIMS / f"{source}.toml"
    text = file.read_text(encoding="utf-8")
    assert text.count(wrong) == 1
    changed = text.replace(wrong, wrong.replace(" 4]", " 5]") if right == "4 is 5" else right)
    monkeypatch.setattr(module, "published_file", lambda _: module.tomllib.loads(changed))
    before = {c.key: c for c in every_claim_unchanged(source)}
    (typed,) = [c for c in claims_in(source) if c.published != before[c.key].published]
    assert judged_claim(before[typed.key]).verdict is ClaimVerdict.REPRODUCED
    assert judged_claim(typed).verdict is ClaimVerdict.NOT_REPRODUCED
    assert kept_claim(typed) is None  # and it is not the figure that the last run judged


def every_claim_unchanged(source: str) -> list[Claim]:
    text = (module.FOLDER_OF_CLAIMS / f"{source}.toml").read_text(encoding="utf-8")
    file = module.tomllib.loads(text)
    return [
        module._claim(source, {**table, **dict(zip(table["columns"], row, strict=True))})
        for table in file["table"]
        for row in table["rows"]
    ]


def test_another_setting_is_another_claim() -> None:
    other = replace(CLAIM, setting={"formula": "101"})
    assert other.key == CLAIM.key
    assert other.asked != CLAIM.asked
    assert replace(CLAIM, why="in other words").asked == CLAIM.asked


def test_a_formula_is_read_and_never_executed() -> None:
    assert computed_sum({"formula": "2 * (P - 1) * L / P", "P": 8, "L": 4}) == 7
    assert computed_sum({"formula": "ceil(-x / 2) + 2 ** 3", "x": 3}) == 7
    for formula in ("y + 1", "__import__('os')", "P.real", "'a' * 3", "[1][0]", "min(*P)"):
        with pytest.raises(ValueError, match="has no meaning here"):
            computed_sum({"formula": formula, "P": 8})


def test_a_row_that_does_not_fit_its_columns_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    file = {"table": [{"name": "t", "columns": ["a", "published"], "rows": [[1]]}]}
    monkeypatch.setattr(module, "published_file", lambda _: file)
    with pytest.raises(ValueError, match=r"row \[1\] has not columns"):
        list(claims_in("s"))


def test_the_listing_counts_every_source_and_is_quick(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["source"] for row in rows] == list(source_names())
    fields = ["reproduced", "not_reproduced", "baseline_only", "not_checkable"]
    for row in rows:
        assert list(row) == ["source", "figures", *fields]
        assert row["figures"] == sum(row[name] for name in fields)
    assert sum(row["figures"] for row in rows) >= 250
    assert call() == 0
    printed = capsys.readouterr().out
    assert "Verdicts are those of the whole run of" in printed
    assert all(name in printed for name in source_names())


def test_a_source_shows_figures_tolerance_and_where_they_are_from(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call("article-cp-ulysses") == 0
    printed = capsys.readouterr().out
    assert "1792" in printed
    assert "may be" in printed
    assert "Source: the table of volumes" in printed
    assert "0 not reproduced" in printed
    assert call("article-upipe", "--table", "lengths of", "--json") == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["published"], row["ours"], row["verdict"]) == (1024, 5120, "not reproduced")
    assert "5M" in row["why"]


def test_a_figure_is_found_by_its_place_in_the_source_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call("upipe", "--figure", "fig5", "--kept", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 15
    assert all("figure 5" in row["where"] for row in rows)


def test_kept_verdicts_are_shown_without_computing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "judged_claim", None)
    call("ultraattn", "--kept")
    printed = capsys.readouterr().out
    assert "fair" in printed
    assert "fig7: training, sparse patterns" in printed


def test_counted_claims_have_small_runs_of_their_own() -> None:
    (claim,) = [c for c in claims_of("tasp") if c.what == "ring over tasp"]
    runs = list(small_runs_of(claim))
    assert [(run.strategy, run.cp, run.heads_q, run.heads_kv) for run in runs] == [
        ("ring", 4, 4, 4),
        ("tasp", 4, 4, 4),
    ]
    assert {run.transport.value for run in runs} == {"gloo"}
    shared = [c for c in claims_of("article-cp-ulysses") if "32/8" in c.what]
    assert {(run.heads_q, run.heads_kv) for c in shared for run in small_runs_of(c)} == {(8, 4)}
    assert not small_configs(c for c in claims_of("alst"))  # nothing of it is counted in a plan


def test_predictions_that_wait_for_a_figure_are_counted_nowhere() -> None:
    waiting = judged(Ours(value=1.0), published=None)
    assert counts_of([waiting])["figures"] == 0
    missing = judged(None, published=None, missing="a number")
    assert counts_of([missing]) == counts_of([judged(None, missing="a number")])
    assert counts_of([missing])["not_checkable"] == 1


def test_formulas_counts_and_predictions_are_told_apart() -> None:
    used = {KINDS[claim.kind].provenance for claim in every_claim() if claim.kind}
    assert used >= {
        Provenance.FORMULA,
        Provenance.COUNTED,
        Provenance.SOLVED,
        Provenance.SIMULATED,
    }


def test_wrong_calls_say_what_there_is() -> None:
    with pytest.raises(ValueError, match="choose from"):
        published_file("nobody")
    with pytest.raises(ValueError, match="matches no table"):
        call("upipe", "--table", "nothing like it")
    for words, rule in (
        (("upipe", "--cp", "8"), "only apply to ultraattn"),
        (("--all",), "name their folder"),
        (("--all", "upipe", "-o", "x"), "drop the source"),
        (("-o", "x"), "only applies with --all"),
        (("--small", "--kept"), "drop --all"),
        (("--table", "fig7"), "name a source"),
    ):
        with pytest.raises(ValueError, match=rule):
            call(*words)
