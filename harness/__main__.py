"""Run the command line: `python -m harness VERB`, or `cpbench VERB` where it is installed."""

import os
import signal
import sys
from importlib.util import find_spec
from typing import NoReturn

_NEEDED = ("numpy", "psutil", "rich", "torch")
_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def _stop(*_: object) -> None:
    """End at once, in a line: imports take seconds, and some of them swallow exceptions."""
    verb = sys.argv[1] if len(sys.argv) > 1 else "harness"
    os.write(2, f"{verb}: interrupted; nothing was begun\n".encode())
    os._exit(_INTERRUPTED)


def _open_streams() -> None:
    """Give a stream that was closed (`>&-`) to nobody, so that no other file gets its number."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: its own
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w"))


def main() -> NoReturn:
    """Run a verb and end the process with its status; `cpbench` is this function."""
    _open_streams()
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, _stop)
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(
            f"harness: {sys.executable} lacks {', '.join(missing)}; use .venv/bin/python, which "
            "scripts/setup makes, or install the project"
        )
    from harness import cli

    def begin() -> None:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    sys.exit(cli.main(begin=begin))


if __name__ == "__main__":
    main()
