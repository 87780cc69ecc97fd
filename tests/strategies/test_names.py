"""A strategy is one file: nothing else spells its name, but what is about others' use of it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from strategies import EVERY_STRATEGY

HARNESS = Path(__file__).parents[2] / "harness"
ALLOWED = {
    "planning/peers.py": "functions of other projects, by their names for them",
    "planning/frameworks.py": "settings of frameworks, by their names for them",
    "peers/ring_flash_attn.py": "likewise",
    "peers/yunchang.py": "likewise",
    "plan/sharding.py": "placements of tokens, which have names of their own",
    "fit/cluster.py": "labels of published runs that it fits to",
    "reproduce/published_runs.py": "methods of published figures",
    "reproduce/case.py": "labels of published runs",
    "reproduce/chart_rows.py": "methods of published charts",
    "reproduce/ultraattn_rows.py": "labels of published runs",
    "reproduce/speedups.py": "likewise",
    "reproduce/speedup_times.py": "likewise",
    "commands/reproduce.py": "the heading of flags for one source",
    "commands/plan.py": "a plan's picture is a grid",
    "planning/rings.py": "the way home round a ring, an option's value",
    "execute/rope_parameters.py": "a kind of rotary scaling in published configurations",
    "commands/plan_levels.py": "the report of one planner, whose own plan it names",
}


def spelled(source: str) -> Iterator[str]:
    """Strings of a module that are a strategy as it is typed, with options or without."""
    called = [(each.name, *each.aliases) for each in EVERY_STRATEGY.values()]
    names = [name.partition(":")[0] for each in called for name in each]
    typed = re.compile(f"({'|'.join(map(re.escape, names))})(:.*)?", re.DOTALL)
    for node in ast.walk(ast.parse(source)):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and typed.fullmatch(text):
            yield text


def test_no_module_of_the_harness_spells_a_strategy() -> None:
    found = {
        path.relative_to(HARNESS).as_posix(): list(spelled(path.read_text()))
        for path in sorted(HARNESS.rglob("*.py"))
    }
    assert len(found) > 100
    assert {name: texts for name, texts in found.items() if texts and name not in ALLOWED} == {}
    assert [name for name in ALLOWED if not found.get(name)] == []


def test_a_spelled_strategy_is_seen() -> None:
    source = 'x = ["ring", "usp:4x2", "a2a", "ring of ranks", f"upipe:ring={1}", "spring"]'
    assert list(spelled(source)) == ["ring", "usp:4x2", "a2a", "upipe:ring="]
