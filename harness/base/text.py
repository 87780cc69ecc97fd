"""Text that comes from elsewhere (workers, records, files), fit to be printed and kept."""

MOST = 2**16
"""Characters; longer texts end in dots."""


def printable(text: str, most: int = MOST) -> str:
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
