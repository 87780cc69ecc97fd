"""A public name means one thing, wherever in the project it is read."""

import ast
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("patterns", "strategies", "harness")

# Names of one meaning that each file of a kind defines anew, and those files.
INTERFACES: Mapping[str, tuple[str, ...]] = {
    "STRATEGY": ("strategies/*",),  # what the table of strategies lists
    "plan": ("strategies/*",),  # the planner of a strategy
    "resolve": ("strategies/*",),  # fills in the options that a strategy leaves to the problem
    "Options": ("strategies/*",),  # what a user may choose inside a strategy
    "alternatives": ("strategies/*",),  # what a strategy can do where it cannot do what was asked
    "settings": ("strategies/*",),  # what frameworks call a strategy
    "volume": ("strategies/*",),  # a strategy's closed form
    "PAPER": ("strategies/*",),  # where a strategy was published
    "register": ("harness/commands/*",),  # adds a verb to the command line
    "run": ("harness/commands/*",),  # does what a verb was asked for
    "as_json": ("harness/commands/*", "harness/explain/*"),  # the fields of --json
    "main": ("harness/__main__.py", "harness/cli.py"),  # the command line, and the process around
    "adapt": ("harness/peers/*",),  # makes a package's function ready for one rank
    "forward": ("harness/execute/*", "harness/peers/*"),  # attention of one kernel
    "backward": ("harness/execute/*", "harness/peers/*"),  # its gradients
    "capabilities": ("harness/execute/*",),  # which kernels can be used here, and why others not
}

# Names that two rooms use in senses of their own. Each that is renamed leaves this list.
HOMONYMS = frozenset({"from_json"})


def definitions(source: str) -> Iterator[tuple[str, str]]:
    """Yield each public name at the top of a module, and what two equal definitions share.

    A type variable has no meaning of its own, and an alias or a constant is as good as another one
    that is spelled alike.
    """
    for node in ast.parse(source).body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names, meaning = [name], ""
            case ast.Assign(targets=targets, value=value):
                found = (n for each in targets for n in ast.walk(each))
                names = [n.id for n in found if isinstance(n, ast.Name)]
                meaning = ast.unparse(value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                names, meaning = [name], ast.unparse(value)
            case _:
                continue
        if not meaning.startswith(("TypeVar(", "ParamSpec(")):
            yield from ((name, meaning) for name in names if not name.startswith("_"))


def homonyms(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names that files define in more than one meaning, and those files."""
    meanings: dict[str, dict[str, list[str]]] = {}
    for file, source in sources.items():
        for name, text in definitions(source):
            shared = any(fnmatch(file, pattern) for pattern in INTERFACES.get(name, ()))
            meaning = "interface" if shared else text or file
            meanings.setdefault(name, {}).setdefault(meaning, []).append(file)
    return {
        name: sorted(file for files in each.values() for file in files)
        for name, each in meanings.items()
        if len(each) > 1
    }


def test_no_public_name_is_defined_in_two_meanings() -> None:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = homonyms({path.relative_to(ROOT).as_posix(): path.read_text() for path in paths})
    new = {name: files for name, files in found.items() if name not in HOMONYMS}
    assert not new, "rename one of each, or say in this file why both mean the same"
    assert set(found) >= HOMONYMS, f"these can leave the list: {sorted(HOMONYMS - set(found))}"


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        ("class Cell: ...", "class Cell: ...", ["Cell"]),
        ("def cut(): ...", "cut = 3", ["cut"]),
        ("FULL, CAUSAL = 1, 2", "CAUSAL: int = 5", ["CAUSAL"]),
        ("Cells = tuple[int, ...]", "Cells = list[int]", ["Cells"]),
        ("Cells = tuple[int, ...]", "Cells = tuple[int, ...]", []),
        ("T = TypeVar('T')", "T = TypeVar('T', bound=int)", []),
        ("def _cut(): ...", "def _cut(): ...", []),
        ("def f():\n    def cut(): ...", "def cut(): ...", []),
        ("from a import cut", "def cut(): ...", []),
    ],
)
def test_two_definitions_are_told_apart(one: str, other: str, wanted: list[str]) -> None:
    assert list(homonyms({"harness/a.py": one, "harness/b.py": other})) == wanted


def test_what_every_strategy_defines_is_one_interface() -> None:
    code = "def plan(): ..."
    assert not homonyms({"strategies/a.py": code, "strategies/b/c.py": code})
    assert homonyms({"strategies/a.py": code, "harness/b.py": code}) == {
        "plan": ["harness/b.py", "strategies/a.py"]
    }
