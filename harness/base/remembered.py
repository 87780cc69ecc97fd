"""Results of functions, remembered up to a number of bytes: the ones used longest ago go first.

Plans differ in size by a factor of ten thousand, so that no number of them bounds memory.
"""

import gc
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import update_wrapper
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

MEMORY_VARIABLE, DEFAULT_MEMORY_MIB = "CPBENCH_MEMORY_MIB", 256
_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType)
"""Types whose values live as long as the process, so references to them cost nothing."""
_LONG = 1024


def memory_limit_bytes() -> int:
    """Return how much each function may remember: CPBENCH_MEMORY_MIB, 256 MiB by default.

    Raises:
        ValueError: The variable is not a whole number of MiB.
    """
    return mib(MEMORY_VARIABLE, DEFAULT_MEMORY_MIB)


def mib(variable: str, default: int) -> int:
    """Read a variable of the environment as bytes.

    Raises:
        ValueError: The text is not a whole number of MiB, 0 or more.
    """
    text = os.environ.get(variable) or str(default)
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise ValueError(f"{variable} ({text}) must be a whole number of MiB; try {default}")
    return int(text) << 20


def bytes_of(value: object) -> int:
    """Estimate the bytes of a value and of all that it refers to, each object once.

    Of a sequence longer than `_LONG` every n-th item stands for n. Classes, modules and functions,
    and what only they refer to, count nothing.
    """
    return _weigh([value], {id(value)})


def _weigh(level: Sequence[object], seen: set[int]) -> int:
    total = 0
    while level:
        total += sum(map(sys.getsizeof, level))
        seen.update(map(id, map(type, level)))
        short: list[object] = []
        for each in level:
            if isinstance(each, tuple | list) and len(each) > _LONG:
                every = len(each) // _LONG + 1
                total += every * _weigh(_new(each[::every], seen), seen)
            else:
                short.append(each)
        level = _new(gc.get_referents(*short), seen)
    return total


def _new(objects: Sequence[object], seen: set[int]) -> list[object]:
    """Objects that were not seen before; now they are."""
    found = dict(zip(map(id, objects), objects, strict=True))
    for known in found.keys() & seen:
        del found[known]
    seen.update(found)
    return [each for each in found.values() if not isinstance(each, _SHARED)]


class Remembered(Generic[P, R]):
    """A function that remembers its results; made by `remembered`.

    The newest result stays however large it is, so that the next call with the same arguments does
    not do the work again.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        self.__wrapped__ = function
        self._kept: OrderedDict[Hashable, tuple[R, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.held_bytes = 0
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the function's result for these arguments, which must be hashable."""
        key = (args, tuple(sorted(kwargs.items())))
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]
        result = self.__wrapped__(*args, **kwargs)
        size = bytes_of((key, result))
        limit = memory_limit_bytes()
        with self._lock:
            if key not in self._kept:
                self._kept[key] = (result, size)
                self.held_bytes += size
            while self.held_bytes > limit and len(self._kept) > 1:
                _, (_, gone) = self._kept.popitem(last=False)
                self.held_bytes -= gone
        return result

    def cache_clear(self) -> None:
        """Forget all results."""
        with self._lock:
            self._kept.clear()
            self.held_bytes = 0


def remembered(function: Callable[P, R]) -> Remembered[P, R]:
    """Let a module's function remember its results up to `memory_limit_bytes`."""
    return Remembered(function)
