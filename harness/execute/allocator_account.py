"""The memory account: bytes that an execution really holds, taken from the allocator.

A dispatch mode sees every operator that makes a tensor and follows its storage until that is freed.
It knows nothing of plans or of their sizes, so it can be held against the ledger.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.plan.tasks import Memory, Place


class Account(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no annotations
    """Follow the storages that are made while active; use as a context manager and as a `Watch`.

    Args:
        cp: How many ranks.
        inputs: Tensors that are there before, per place; they count throughout.
    """

    def __init__(self, cp: int, inputs: Mapping[Place, Iterable[torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch: no annotations
        self.live = {Place(rank, memory): 0 for memory in Memory for rank in range(cp)}
        self.peak = dict(self.live)
        self._place = Place(0)
        self._in_kernel = False
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for place, tensors in inputs.items():
            for tensor in tensors:
                self._place = place
                self._follow(tensor)
        self.peak = dict(self.live)

    def peaks(self, memory: Memory = Memory.DEVICE) -> tuple[int, ...]:
        """Return the most that each rank held in a memory, in bytes."""
        return tuple(peak for place, peak in self.peak.items() if place.memory is memory)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard costs more than the account

    def on_place(self, place: Place) -> None:
        """Charge what follows to a rank's memory."""
        self._place = place

    def in_kernel(self) -> AbstractContextManager[object]:
        """Leave out what is made and freed inside; what remains counts at the end."""
        return self._kernel()

    @contextmanager
    def _kernel(self) -> Iterator[None]:
        self._in_kernel = True
        try:
            yield
        finally:
            self._in_kernel = False
            self._mark()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operator and follow the storages of its results."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._follow(leaf)
        if not self._in_kernel:
            self._mark()
        return result

    def _mark(self) -> None:
        self.peak[self._place] = max(self.peak[self._place], self.live[self._place])

    def _follow(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        place, size = self._place, storage.nbytes()
        self.live[place] += size

        def gone(_: object) -> None:
            del self._known[key]
            self.live[place] -= size

        self._known[key] = weakref.ref(storage, gone)
