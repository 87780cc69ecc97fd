"""Whole messages through a pipe between a parent and its worker, never waited for without end.

The pipe is a pair of sockets without a name that the worker inherits, so no other process reaches
it. A message is its length, 8 bytes big endian, and its bytes.
"""

import os
import select
import struct
import time
from multiprocessing.connection import Connection

MOST_BYTES = 2**34
"""Of a message; whoever claims more does not speak this form."""
_LENGTH = struct.Struct(">Q")
_AT_ONCE = 2**20


class Pipe:
    """The parent's end: it never blocks for longer than it is told to.

    Args:
        connection: One end of the pair; closed by `close`.
        most_bytes: Of a message; more is not taken.
    """

    def __init__(self, connection: Connection, most_bytes: int = MOST_BYTES) -> None:
        self._connection = connection
        self._most = most_bytes
        self._there = bytearray()
        os.set_blocking(connection.fileno(), False)

    def fileno(self) -> int:
        """For `multiprocessing.connection.wait`."""
        return self._connection.fileno()

    def send(self, message: bytes, timeout_s: float) -> None:
        """Send a message.

        Raises:
            TimeoutError: The worker did not read it in time.
            BrokenPipeError, ConnectionResetError: It is gone.
        """
        rest = memoryview(_LENGTH.pack(len(message)) + message)
        end = time.monotonic() + timeout_s
        while rest:
            _, ready, _ = select.select([], [self], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError("the worker reads nothing")
            rest = rest[os.write(self.fileno(), rest[:_AT_ONCE]) :]

    def receive(self) -> bytes | None:
        """Take the next message that has arrived in full; None if none has.

        Several may have arrived at once: ask until None before waiting for more.

        Raises:
            EOFError: The other end is closed.
            ValueError: The bytes do not begin a message.
        """
        while (message := self._cut()) is None:
            try:
                part = os.read(self.fileno(), _AT_ONCE)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                part = b""
            if not part:
                raise EOFError("the worker closed its pipe")
            self._there += part
        return message

    def _cut(self) -> bytes | None:
        if len(self._there) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._there)
        if size > self._most:
            raise ValueError(f"message of {size} bytes must have at most {self._most}")
        end = _LENGTH.size + size
        if len(self._there) < end:
            return None
        message = bytes(self._there[_LENGTH.size : end])
        del self._there[:end]
        return message

    def close(self) -> None:
        """Close it."""
        self._connection.close()


def send(connection: Connection, message: bytes) -> None:
    """Send a message from the worker's end."""
    rest = memoryview(_LENGTH.pack(len(message)) + message)
    while rest:
        rest = rest[os.write(connection.fileno(), rest[:_AT_ONCE]) :]


def receive(connection: Connection) -> bytes:
    """Wait for a message at the worker's end.

    Raises:
        EOFError: The parent is gone.
    """
    (size,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    return _read(connection, size)


def _read(connection: Connection, size: int) -> bytes:
    there = bytearray()
    while len(there) < size:
        part = os.read(connection.fileno(), min(_AT_ONCE, size - len(there)))
        if not part:
            raise EOFError("the parent closed its pipe")
        there += part
    return bytes(there)
