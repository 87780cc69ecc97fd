"""Where what took long to make is kept between runs, and what makes it stale."""

import hashlib
import os
from functools import cache
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of everything that is kept: CPBENCH_CACHE, or one in the user's cache."""
    own = os.environ.get("CPBENCH_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cpbench"


@cache
def code_hash() -> str:
    """Return a hash of all code here: what other code has made is not read."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for package in ("harness", "patterns", "strategies"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
