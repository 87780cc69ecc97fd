"""Patterns by name: canonical text, and errors that say what to do."""

from pathlib import Path

import pytest
from hypothesis import given

from patterns import PATTERNS, Pattern, make_pattern
from tests.patterns.generators import any_patterns


@given(any_patterns)
def test_the_canonical_text_makes_the_same_pattern_again(pattern: Pattern) -> None:
    again = make_pattern(pattern.text, pattern.seqlen_q, pattern.seqlen_kv, cross=True)

    assert pattern == again
    assert pattern.text == again.text
    assert pattern.bands == again.bands


CANONICAL = [
    ("full", "full"),
    (" causal : align = top_left ", "causal"),
    ("causal:align=bottom_right", "causal:align=bottom_right"),
    ("window:left=128,right=0", "window"),
    ("window:right=2,left=007", "window:left=7,right=2"),
    ("documents:mask=causal,lengths=5+ 03 +4", "documents:lengths=5+3+4"),
    ("documents:mask=full,lengths=12", "documents:lengths=12,mask=full"),
    ("documents:window=all,lengths=12", "documents:lengths=12"),
    ("documents:window=03,seed=0,preset=pile", "documents:preset=pile,window=3"),
    ("random_topk:seed=4,topk=16", "random_topk:seed=4"),
    ("star:blocks=8", "star:blocks=8"),
    ("streaming:local=3", "streaming"),
    ("global_local:global=0,blocks=4", "global_local:blocks=4,global=0"),
    ("strided_original:stride=2", "strided_original:stride=2"),
]


@pytest.mark.parametrize(("typed", "canonical"), CANONICAL)
def test_a_text_is_printed_in_one_way(typed: str, canonical: str) -> None:
    assert canonical == make_pattern(typed, 12).text


ALONE = [
    name
    for name, kind in PATTERNS.items()
    if all(parameter.default is not None for parameter in kind.parameters.values())
]


@pytest.mark.parametrize("name", ALONE)
def test_a_name_whose_parameters_have_defaults_makes_a_pattern_alone(name: str) -> None:
    pattern = make_pattern(name, 33)

    assert name == pattern.text
    assert 0 < pattern.total_area <= 33 * 33
    assert PATTERNS[name].summary


def test_a_path_may_hold_commas_and_colons(tmp_path: Path) -> None:
    path = tmp_path / "a,b:c.txt"
    path.write_text("10\n21")

    assert f"table:file={path}" == make_pattern(f"table:file={path}", 9).text


REFUSED = [
    (
        "casual",
        {},
        r"unknown pattern 'casual' .did you mean causal\?.; choose one of full, causal, window",
    ),
    ("full:left=2", {}, r"full: 'left=2' must be key=value .* keys of full: none"),
    ("window:left", {}, r"window: 'left' must be key=value"),
    ("window:left=2,left=3", {}, r"'left=3' must be key=value with each key once"),
    ("window:left=-3", {}, r"window: left \(-3\) must be a whole number in 0\.\.1073741824; try"),
    ("star:blocks=0", {}, r"star: blocks \(0\) must be a whole number in 1\.\.4096; try 4"),
    ("star:blocks=5000", {}, r"star: blocks \(5000\) must be a whole number in 1\.\.4096"),
    (f"window:left={'9' * 5000}", {}, r"must be a whole number in 0\.\.1073741824; try"),
    (f"documents:lengths=5+{'9' * 5000}", {}, r"must be whole numbers in 1\.\.1073741824 joined"),
    ("star:blocks=2.5", {}, r"star: blocks \(2\.5\) must be a whole number"),
    ("causal:align=left", {}, r"align \(left\) must be one of top_left, bottom_right"),
    ("documents", {}, r"documents: lengths is missing and has no default"),
    ("documents:lengths=4+0", {}, r"lengths \(4\+0\) must be whole numbers in 1\.\."),
    ("documents:lengths=4+3", {}, r"lengths sum to 7, .* length \(12\); add a document of 5"),
    ("documents:lengths=9+8", {}, r"lengths sum to 17, .*; shorten a document"),
    ("documents:lengths=9+-8", {}, r"lengths \(9\+-8\) must be whole numbers in 1\.\."),
    ("documents:preset=megatrn", {}, r"preset \(megatrn\) must be one of megatron, .*pile_arxiv"),
    ("documents:preset=pile,lengths=12", {}, r"lengths and preset \(pile\) both say .*; leave one"),
    ("documents:preset=pile,seed=-1", {}, r"seed \(-1\) must be a whole number in 0\.\."),
    (
        "documents:lengths=12,window=x",
        {},
        r"window \(x\) must be a whole number in 0\.\..*, or all",
    ),
    ("varlen_block_causal:block=3", {}, r"lengths is missing .* or varlen_block_causal:preset="),
    ("shared_question:percent=101", {}, r"percent \(101\) must be a whole number in 0\.\.100"),
    (
        "documents:lengths=12",
        {"seqlen_kv": 7, "cross": True},
        r"seqlen_q \(12\) differs from seqlen_kv \(7\), but has no meaning for cross-attention",
    ),
    ("causal", {"seqlen_kv": 7}, r"seqlen_q \(12\) differs from seqlen_kv \(7\), .* cross=True"),
    ("causal", {"seqlen_kv": 0}, r"causal: seqlen_kv \(0\) must be in 1\.\.1073741824 tokens"),
    ("table:file=", {}, r"table: file \(\) must be a path"),
]


@pytest.mark.parametrize(("text", "options", "message"), REFUSED)
def test_a_wrong_text_is_refused_with_the_rule_and_a_way_out(
    text: str, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_pattern(text, 12, **options)
