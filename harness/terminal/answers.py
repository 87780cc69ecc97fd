"""A recommendation as text: the answer, what is near it, where it flips, and commands."""

from collections.abc import Iterable
from textwrap import wrap

from rich.console import Console

from harness.base.text import printable
from harness.plan.tasks import Scope
from harness.recommend.answer import Recommendation
from harness.recommend.frameworks import settings_of
from harness.recommend.question import Asked
from harness.report.format import memory, milliseconds, short
from harness.terminal.progress import wrapped

_INDENT = 10
_MOST = 6


def print_answer(console: Console, question: Asked, answer: Recommendation) -> None:
    """Print the answer to one question."""
    console.print(wrapped(_heading(question)))
    console.print()
    if answer.strategy is None:
        console.print("Nothing runs.")
    else:
        for label, text in _lines(question, answer):
            _row(console, label, text)
    for label, text in _refusals(answer):
        _row(console, label, text)
    if answer.confirm:
        console.print()
        console.print("confirm it, on the real cluster with the second command:")
        for command in answer.confirm:
            console.print(f"  {command}", soft_wrap=True)
    console.print()


def _row(console: Console, label: str, text: str) -> None:
    lines = wrap(
        printable(text),
        max(console.width, 2 * _INDENT) - _INDENT,  # a label, and a short word beside it
        break_long_words=False,
        break_on_hyphens=False,
    )
    for first, line in zip([label, *[""] * len(lines)], lines, strict=False):
        console.print(f"{first:<{_INDENT}}{line}", soft_wrap=True)


def _heading(question: Asked) -> str:
    masks = " + ".join(
        pattern if len(question.patterns) == 1 else f"{count} x {pattern}"
        for pattern, count in question.patterns
    )
    layer = "one layer" if question.scope is Scope.LAYER else "attention of one layer"
    if len(question.patterns) > 1:
        layer += f", mean of {question.layers}"
    passes = " + ".join(direction.value for direction in question.directions)
    return (
        f"{masks}, {short(question.seqlen)} tokens, {question.heads_q}/{question.heads_kv} heads "
        f"of {question.head_dim}, {question.dtype.value}, cp {question.cp} on {question.named}: "
        f"{layer}, {passes}"
    )


def _lines(question: Asked, answer: Recommendation) -> Iterable[tuple[str, str]]:
    """Labels and texts of an answer that runs."""
    assert answer.strategy is not None
    assert answer.time_s is not None
    yield "use", answer.strategy
    yield "time", _time(answer)
    if answer.peak_bytes is not None:
        room = f"{memory(answer.peak_bytes)} of {memory(question.memory_bytes)} bytes on a GPU"
        yield "memory", f"{room} (K, M, G = 1024^1, 2, 3)"
    if answer.second is None:
        yield "second", "nothing else runs"
    else:
        yield "second", f"{answer.second.strategy}: {_against(answer.second.time_s, answer)}"
    yield from _ties(answer)
    yield from _flips(answer)
    for setting in settings_of(answer.strategy, question):
        text = f"{setting.framework.value}: {setting.text}  [{setting.source}]"
        yield "settings", text


def _time(answer: Recommendation) -> str:
    assert answer.time_s is not None
    text = f"{milliseconds(answer.time_s)} ms, "
    if answer.expected_error is None:
        text += "simulated; its error is unknown here"
    else:
        text += f"simulated; expected error {answer.expected_error:.0%}"
    if answer.bound_s:
        ratio = answer.time_s / answer.bound_s
        text += f"; no plan takes less than {milliseconds(answer.bound_s)} ms ({ratio:.2f} x)"
    return text


def _against(time_s: float, answer: Recommendation) -> str:
    assert answer.time_s is not None
    share = time_s / answer.time_s - 1
    slower = "slower" if share >= 0 else "faster"
    return f"{milliseconds(time_s)} ms, {abs(share):.1%} {slower}"


def _ties(answer: Recommendation) -> Iterable[tuple[str, str]]:
    if not answer.ties:
        return
    known = answer.expected_error is not None
    within = "the expected error" if known else "10 %, as no error is known"
    first = answer.ties[:_MOST]
    named = ", ".join(f"{one.strategy} ({_against(one.time_s, answer)})" for one in first)
    more = f", and {len(answer.ties) - _MOST} more" if len(answer.ties) > _MOST else ""
    yield (
        "tied",
        f"within {within}: {named}{more}; broken by memory, in steps of a tenth of what a GPU "
        "holds, then by fewer options, then by time",
    )


def _flips(answer: Recommendation) -> Iterable[tuple[str, str]]:
    if not answer.flips:
        yield "flips", "nowhere near: shorter and longer, on fewer ranks, on other links"
    for flip in answer.flips:
        there = "nothing runs"
        if flip.strategy is not None and flip.time_s is not None:
            there = f"{flip.strategy}, {milliseconds(flip.time_s)} ms"
            if flip.kept_time_s is not None:
                there += f" against {milliseconds(flip.kept_time_s)} ms"
        yield "flips", f"{_place(flip.axis, flip.value)}: {there}"


def _place(axis: str, value: float) -> str:
    if axis == "seqlen":
        return f"at {short(round(value))} tokens"
    if axis == "cp":
        return f"on {round(value)} ranks"
    where = "between nodes" if axis == "nic" else "inside a node"
    return f"with links {where} {value:g} x as fast"


def _refusals(answer: Recommendation) -> Iterable[tuple[str, str]]:
    """Reasons, each once, with the names that it is given for."""
    found: dict[str, list[str]] = {}
    for one in answer.refused:
        found.setdefault(one.reason, []).append(one.strategy)
    for reason, names in found.items():
        more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
        told = reason.removeprefix(f"{names[0]}: ") if len(names) == 1 else reason
        yield "refused", f"{', '.join(names[:_MOST])}{more}: {told}"
