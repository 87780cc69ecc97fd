"""Messages of a launch, in the store that its ranks share, each signed with the launch's secret.

A store takes whatever any process writes that can connect to it. So what is read here is bytes and
never more; and who does not know the secret can write no message that a rank would heed.
"""

import hashlib
import hmac
import time
from typing import TYPE_CHECKING

from harness.base.pipe import MOST_BYTES

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_PART = 2**22  # bytes of a value in the store; it refuses more than 8 MiB
_MOST_PARTS = MOST_BYTES // _PART
_POLL_S, _POLL_MOST_S = 0.002, 0.1


class Box:
    """Messages of any size, by key.

    Args:
        store: A `torch.distributed` store that all ranks share.
        secret: Of the launch.
    """

    def __init__(self, store: "Store", secret: bytes) -> None:
        self._store = store
        self._secret = secret

    def put(self, key: str, data: bytes) -> None:
        """Leave a message."""
        parts = [data[at : at + _PART] for at in range(0, len(data), _PART)]
        for number, part in enumerate(parts):
            self._store.set(f"{key}/{number}", part)  # type: ignore[arg-type]  # bytes do
        self._store.set(key, f"{len(parts)} {self._signature(key, data)}")

    def take(self, key: str, *, keep: bool = False) -> bytes | None:
        """Return a message from one of the ranks and remove it; None if no rank wrote one."""
        if not self._store.check([key]):
            return None
        count, _, signature = self._store.get(key).decode(errors="replace").partition(" ")
        if not (count.isascii() and count.isdigit() and len(count) < 9):
            return None
        names = [f"{key}/{number}" for number in range(min(int(count), _MOST_PARTS))]
        if names and not self._store.check(names):
            return None
        data = b"".join(map(self._store.get, names))
        if not hmac.compare_digest(signature.encode(), self._signature(key, data).encode()):
            return None
        if not keep:
            for name in (key, *names):
                self._store.delete_key(name)
        return data

    def waited(
        self, key: str, deadline: float | None = None, *, keep: bool = False
    ) -> bytes | None:
        """Wait for a message; None once `deadline`, of the monotonic clock, has passed.

        The store is polled: its own wait cannot tell a time-out from a store that is gone. What is
        signed wrongly is no message: the true one may still come.
        """
        pause = _POLL_S
        while (data := self.take(key, keep=keep)) is None:
            if deadline is not None and time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = min(2 * pause, _POLL_MOST_S)
        return data

    def _signature(self, key: str, data: bytes) -> str:
        """Of a message in its place: none can be put in the place of another."""
        sealed = hmac.new(self._secret, key.encode() + b"\0", hashlib.sha256)
        sealed.update(data)
        return sealed.hexdigest()
