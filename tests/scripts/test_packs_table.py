"""The table of packs: means over those that ran, refusals with their reason, the verdict."""

from typing import Any

import pytest

from tests.scripts.test_help import loaded


def cell(strategy: str, seed: int, seconds: float | None) -> dict[str, Any]:
    found = {
        "seconds": seconds,
        "bound_s": 0.002,
        "imbalance": 1.25,
        "received_bytes": 3 << 30,
        "most_tokens": 24,
    }
    named = {"preset": "pile", "seed": seed, "cp": 4, "seqlen": 65536, "strategy": strategy}
    return {**named, **(found if seconds is not None else {"refused": "no | room"})}


def test_rows_are_means_and_the_verdict_counts_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    script = loaded("packs_table", monkeypatch)
    cells = [
        *(cell("dynamic", 0, 0.004), cell("dynamic", 1, 0.008)),
        *(cell("dynamic:rule=megatron", 0, 0.006), cell("dynamic:rule=megatron", 1, 0.006)),
        cell("ring", 0, None),
    ]
    lines = list(script.tables(cells))

    assert lines[0].strip() == "## cp=4 S=64k documents:preset=pile"
    assert lines[3].split(" | ")[1:] == [
        *("2 of 2", "6.00", "2.00", "3.00× (2.00 to 4.00)", "1", "1.25", "3.00", "0.00 |")
    ]
    assert lines[5] == "| `ring` | 0 of 1 | refused: no / room | | | | | | |"
    assert "is behind `dynamic:rule=megatron` on 1 of 2 packs" in lines[6]
    assert "faster by 1.12× (0.75 to 1.50)" in lines[6]
