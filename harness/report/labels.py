"""Short labels for patterns whose text is long, with a legend; and names of strategies."""

from collections.abc import Iterable, Mapping

from harness.records.cell import CellRecord

_LONGEST = 28
"""Characters of a pattern that stands as it is typed."""


def pattern_labels(records: Iterable[CellRecord]) -> Mapping[str, str]:
    """Label each pattern: its own text, or its name and a number where the text is long.

    Args:
        records: Whose patterns; the numbers follow their order.
    """
    labels: dict[str, str] = {}
    numbers: dict[str, int] = {}
    for entry in records:
        text = entry.config.pattern
        if text in labels:
            continue
        if len(text) <= _LONGEST:
            labels[text] = text
            continue
        name = text.partition(":")[0]
        numbers[name] = numbers.get(name, 0) + 1
        labels[text] = f"{name} #{numbers[name]}"
    return labels


def legend(labels: Mapping[str, str]) -> dict[str, str]:
    """The labels that stand for a longer text, with it."""
    return {label: text for text, label in labels.items() if label != text}
