"""`doctor`: parts that this machine has or lacks, and their uses."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from harness.base.json_fields import json_text
from harness.terminal.arguments import Help, Verbs, example
from harness.terminal.progress import Output

if TYPE_CHECKING:
    from harness.commands.parts.machine_facts import Finding

_GIB = 2**30
_MARKS = {"ok": "ok", "missing": "–", "broken": "broken"}


def register(verbs: Verbs, summary: str | None = None) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "doctor",
        help=summary,
        description="Look for packages, kernels, CUDA and NCCL, start two gloo processes, and say "
        "what each missing part is needed for. The exit status is 0 even if parts are missing.",
        epilog=example(["doctor", "doctor --json"]),
        formatter_class=Help,
    )
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.set_defaults(needs=lambda _: ("harness.commands.parts.machine_facts",), run=run)


def run(args: argparse.Namespace) -> int:
    """Examine this machine."""
    from harness.commands.parts.machine_facts import examine

    facts, findings = examine()
    if args.json:
        body = {"environment": facts, "findings": [finding.as_json() for finding in findings]}
        sys.stdout.write(json_text(body, indent=2) + "\n")
    else:
        _print(Output(markup=False, highlight=False), facts, findings)
    return 0


def _print(console: Output, facts: Mapping[str, object], findings: "Sequence[Finding]") -> None:
    for name, value in _shown(facts):
        console.print(f"{name:<10} {value}", soft_wrap=True)
    console.print()
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    table.add_column("", no_wrap=True)
    table.add_column("what", no_wrap=True)
    for name in ("found", "for"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        table.add_row(_MARKS[finding.state], finding.name, finding.value, finding.serves)
    console.print(table)
    remedies: dict[str, list[str]] = {}
    for finding in findings:
        if finding.remedy:
            remedies.setdefault(finding.remedy, []).append(finding.name)
    if remedies:
        console.print("\nto add missing parts:")
    for remedy, names in remedies.items():
        console.print(f"{', '.join(names)}: {remedy}")


def _shown(facts: Mapping[str, object]) -> list[tuple[str, object]]:
    total, free = facts["memory_bytes"], facts["memory_available_bytes"]
    variables = facts["variables"]
    assert isinstance(total, int)
    assert isinstance(free, int)
    assert isinstance(variables, Mapping)
    state = ", with changes" if facts["dirty"] else ""
    rows: list[tuple[str, object]] = [
        ("python", f"{facts['python']} on {facts['system']}"),
        ("processor", f"{facts['cpu']}, {facts['cores']} cores for this process"),
        ("memory", f"{total / _GIB:.1f} GiB, {free / _GIB:.1f} GiB free"),
        ("checkout", f"{facts['commit'] or 'not a git checkout'}{state}"),
    ]
    return rows + [("variable", f"{name}={value}") for name, value in variables.items()]
