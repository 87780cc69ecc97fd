"""One spelling in all verbs, and the nearest name where one is unknown."""

import json

import pytest

from harness import cli
from strategies import strategy


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(cli.main(words))
    assert stop.value.code == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["sweeep"], "did you mean sweep?"),
        (["plan", "--seqlem", "3"], "--seqlem (did you mean --seqlen?)"),
        (["plan", "--strategy", "zigzg"], "did you mean zigzag?"),
        (["plan", "--pattern", "casual"], "did you mean causal?"),
        (["simulate", "--cluster", "h100_8x8"], "did you mean h100-8x8?"),
        (["sweep", "--model", "llama3-80b"], "did you mean llama3-8b?"),
        (["recommend", "--framework", "megatrom"], "did you mean megatron?"),
    ],
)
def test_an_unknown_name_comes_with_the_nearest(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hint in said(words, capsys)


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("cpbench 0.")


@pytest.mark.parametrize(
    "words",
    [
        ["explain", "--strategy", "ring", "--cp", "2", "--seqlen", "64", "--json"],
        ["sweep", "--dry-run", "--mode", "simulate", "--strategies", "ring", "--json"],
    ],
)
def test_heads_have_one_spelling_in_all_verbs(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for heads in (["--heads", "6/3"], ["--heads-q", "6", "--heads-kv", "3"]):
        assert cli.main([*words, *heads]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    one = found[0][0] if isinstance(found[0], list) else found[0]
    assert (one["heads_q"], one["heads_kv"]) == (6, 3)
    assert "give one of them" in said([*words, *heads, "--heads", "6/3"], capsys)


def test_llama3_is_what_llama_3_does() -> None:
    assert strategy("llama3").text == "allgather:placement=zigzag"
    assert strategy("llama3:prune=false").text == "allgather:prune=false,placement=zigzag"
    assert strategy("llama3:placement=stripe").text == "allgather:placement=stripe"
