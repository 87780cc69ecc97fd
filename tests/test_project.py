"""The project as a whole: its files name no machine, its versions agree, its imports do no work."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import harness

ROOT = Path(__file__).parents[1]
PACKAGES = ("patterns", "strategies", "harness")
TORCH_FREE = ("patterns", "strategies")

# Neither finds itself: no host stands here as one word, and no folder's name between slashes.
MACHINE_PATH = re.compile(r"(?<![\w.*-])/(?:work|farm|root|home|Users)/")
REGISTRIES = {
    "pypi": "org",
    "pythonhosted": "org",
    "registry": "npmjs",
    "deb": "debian",
    "download": "pytorch",
}
REGISTRY_HOST = re.compile("|".join(rf"{name}\.{rest}" for name, rest in REGISTRIES.items()))

# What such a module reads can run any code.
RUNS_WHAT_IT_READS = frozenset(
    ("cloudpickle", "cPickle", "dill", "_pickle", "jsonpickle", "marshal", "pickle", "shelve")
)
SENDS_FUNCTIONS: dict[str, set[str]] = {}

# So can what `multiprocessing` reads from its pipes. Workers inherit theirs, which have no name:
# no other process has an end of one. Nothing of that is kept, or comes over a network.
UNPICKLES = {"harness/base/workers.py"}

# Imports sys.argv[1] where flash_attn cannot be imported, and prints each trace that it left.
# Warning filters are not looked at: importing numpy changes them.
IMPORT_PROBE = """
import os, sys, threading
sys.modules["flash_attn"] = sys.modules["flash_attn_interface"] = None
def state():
    return {
        "environment": dict(os.environ),
        "working directory": os.getcwd(),
        "files": sorted(os.listdir()),
        "threads": threading.active_count(),
        "search path": list(sys.path),
    }
before = state()
package = __import__(sys.argv[1])
after = state()
for name in before:
    if before[name] != after[name]:
        print(name)
if package.__file__ is None:
    print("no __init__.py")
if "torch" in sys.modules:
    print("torch")
"""


def tracked_texts() -> list[tuple[str, str]]:
    """Every text file that git tracks, with its path."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout, so no file is tracked")
    texts = []
    for name in filter(None, listing.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and b"\0" not in (content := path.read_bytes()):
            texts.append((name, content.decode()))
    return texts


@pytest.mark.parametrize(
    "forbidden",
    [
        pytest.param(MACHINE_PATH, id="machine path"),
        pytest.param(REGISTRY_HOST, id="registry host"),
    ],
)
def test_no_tracked_file_names_a_machine(forbidden: re.Pattern[str]) -> None:
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, text in tracked_texts()
        for number, line in enumerate(text.splitlines(), start=1)
        if forbidden.search(line)
    ]
    assert found == []


def test_no_tracked_file_is_a_link() -> None:
    """A link leads to a place that is on one machine only."""
    done = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("120000")] == []


def test_the_changelog_opens_with_the_version_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    top = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert top is not None
    assert top[1] == project["version"]


def test_every_dependency_is_locked_to_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {
        re.split(r"[^\w.-]", requirement)[0].lower()
        for requirement in (
            *project["dependencies"],
            *extras["dev"],
            *extras["browser"],
            *extras["frame"],
            *extras["models"],
            *extras["peers"],
        )
    }
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    assert wanted - {pin.split("==")[0].lower() for pin in pins} == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_does_no_work(package: str, tmp_path: Path) -> None:
    probe = subprocess.run(
        [sys.executable, "-B", "-W", "error", "-c", IMPORT_PROBE, package],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert probe.returncode == 0, probe.stderr
    assert probe.stderr == ""
    left = set(probe.stdout.splitlines())
    assert left <= (set() if package in TORCH_FREE else {"torch"})


def imported(tree: ast.AST) -> set[str]:
    """Top-level names of all modules that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def test_nothing_is_read_in_a_form_that_can_run_code() -> None:
    found: dict[str, set[str]] = {}
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) > 100
    for path in files:
        if unsafe := imported(ast.parse(path.read_text())) & RUNS_WHAT_IT_READS:
            found[path.relative_to(ROOT).as_posix()] = unsafe
    assert found == SENDS_FUNCTIONS


def test_only_workers_pipes_carry_pickles() -> None:
    """A `Connection` unpickles what it receives, as `ForkingPickler` does."""
    reads = re.compile(
        r"ForkingPickler|\.recv\(\)|\bUnpickler\b|\bQueue\b|\bManager\(|torch\.load\(|allow_pickle=True"
    )
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = {p.relative_to(ROOT).as_posix() for p in files if reads.search(p.read_text())}
    assert found == UNPICKLES


def test_every_folder_of_the_harness_stands_on_a_floor() -> None:
    """A new folder is put into the layers contract, and onto the map in the package's docstring."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    layers = tools["importlinter"]["contracts"][0]["layers"]
    placed = {name.strip() for layer in layers for name in layer.split("|")}
    folders = {path.parent.name for path in (ROOT / "harness").glob("*/__init__.py")}
    assert {f"harness.{name}" for name in folders} - placed == set()
    assert len(folders) > 20
    drawn = set(re.findall(r"^\| \d+ +\| (\w+)", harness.__doc__ or "", flags=re.M))
    assert drawn == folders | {"strategies", "errors"}
    fullest = max(len(list((ROOT / "harness" / name).glob("*.py"))) for name in folders)
    assert fullest <= 20


def readme_commands() -> list[list[str]]:
    """The commands in the README's shell blocks, without comments, split into words."""
    blocks = re.findall(
        r"^```(?:sh|bash)\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S
    )
    lines = (line.partition("#")[0].split() for block in blocks for line in block.splitlines())
    return [words for words in lines if words]


def test_the_readme_shows_the_two_commands() -> None:
    commands = readme_commands()
    assert ["make", "sweep"] in commands
    assert ["make", "test"] in commands


def test_every_command_of_the_readme_exists() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    verbs = set()
    for words in readme_commands():
        if words[0] == "make":
            assert words[1] in targets, words
        for word in words:
            if word.startswith("scripts/"):
                assert (ROOT / word).is_file(), words
        if words[1:3] == ["-m", "harness"]:
            verbs.add(words[3])
    for verb in sorted(verbs):
        subprocess.run([sys.executable, "-m", "harness", verb, "--help"], cwd=ROOT, check=True)
