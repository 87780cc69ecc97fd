"""Run the command line: `python -m harness VERB`."""

import sys
from importlib.util import find_spec

_NEEDED = ("numpy", "psutil", "rich", "torch")

if __name__ == "__main__":
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(
            f"harness: {sys.executable} lacks {', '.join(missing)}; use .venv/bin/python, which "
            "scripts/setup makes, or install the project"
        )
    from harness.cli import main

    sys.exit(main())
