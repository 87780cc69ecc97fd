"""Text that comes from elsewhere (workers, records, files), fit to be printed and kept."""

MOST_CHARACTERS = 2**16
"""Characters; longer texts end in dots."""
MOST_LINE = 2_000
MOST_TRACE = 20_000


def printable(text: str, most: int = MOST_CHARACTERS) -> str:
    r"""Spell out what a terminal would act on or UTF-8 cannot hold, and cut what is too long.

    Line ends and tabs stay; an escape becomes `\x1b`, half of a surrogate pair `\ud83d`.

    Args:
        text: Any text.
        most: Characters that are kept.
    """
    cut = text if len(text) <= most else text[:most] + "..."
    if cut.isprintable():
        return cut
    return "".join(map(_spelled, cut))


def _spelled(sign: str) -> str:
    if sign.isprintable() or sign in "\n\t":
        return sign
    return sign.encode("unicode_escape").decode("ascii")


def one_line(text: str, most: int = MOST_LINE) -> str:
    """Return the first line of a text that has anything in it, printable."""
    lines = (line.strip() for line in text[: 2 * most].splitlines())
    return printable(next(filter(None, lines), "(no text)"), most)


def trace(text: str, most: int = MOST_TRACE) -> str:
    """Return a traceback, printable; of a long one the middle is left out, as its ends tell most.

    Args:
        text: Any text.
        most: Characters that are kept.
    """
    if len(text) > most:
        half = most // 2
        text = f"{text[:half]}[... {len(text) - 2 * half} characters ...]{text[-half:]}"
    return printable(text)
