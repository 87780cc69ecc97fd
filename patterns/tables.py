"""The block-sparse patterns of the UltraAttn paper, and the user's own table.

Rows are query blocks, columns key blocks; 0 EMPTY, 1 FULL, 2 CAUSAL.

    star               streaming (5 of 8 blocks)   strided, one of its four groups
    2 0 0 0            2 0 0 0 0                   1 1 1 0
    1 2 0 0            1 2 0 0 0                   1 1 1 1
    1 0 2 0            1 1 2 0 0                   1 1 1 1
    1 0 0 2            1 1 1 2 0                   0 1 1 1
                       1 0 1 1 2

Source:
    UltraAttn (SC'25), section 6 and `search_algo/bsa_utils.py:create_bsa_block_table` of the
    authors' code: `stride_16_4_3`, `local_global_16_1_1`, star(1/4), stream(1/8, 3).
"""

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np

from patterns.areas import Ints
from patterns.files import read_regular
from patterns.kind import BuiltMask, Kind, Parameter, Values, whole_parameter
from patterns.pattern import Bools, Pattern
from patterns.table import CAUSAL, EMPTY, FULL, Table, TableMask, table_bands

_MOST_BLOCKS = 4096  # per axis; the table has the square of it


def strided_table(blocks: int, stride: int, local: int) -> Table:
    """Return the strided table in original order: blocks of one residue, `local - 1` strides apart.

    Blocks c and d see each other iff `c = d (mod stride)` and `|c - d| <= stride * (local - 1)`.
    """
    row, column = _indices(blocks)
    apart = np.abs(row - column)
    return _full_where((apart % stride == 0) & (apart <= stride * (local - 1)))


def strided_order(blocks: int, stride: int) -> tuple[int, ...]:
    """Return the order that gathers the blocks of each residue: entry p = block at place p.

    For 16 blocks and stride 4, block `4 * i + r` goes to place `4 * r + i`.
    """
    return tuple(sorted(range(blocks), key=lambda block: (block % stride, block)))


def global_local_table(blocks: int, local: int, global_: int) -> Table:
    """Return the first `global_` rows and columns, and `local` diagonals to each side, all FULL."""
    row, column = _indices(blocks)
    return _full_where((row < global_) | (column < global_) | (np.abs(row - column) < local))


def streaming_table(blocks: int, local: int) -> Table:
    """Return column 0 and the `local - 1` blocks before the diagonal FULL, the diagonal CAUSAL."""
    row, column = _indices(blocks)
    table = _full_where((row > column) & ((column == 0) | (row - column < local)))
    np.fill_diagonal(table, CAUSAL)
    return table


def star_table(blocks: int) -> Table:
    """Return column 0 FULL and the diagonal CAUSAL."""
    return streaming_table(blocks, 1)


def remap_order(pattern: Pattern) -> list[int] | None:
    """Return the block order that makes `pattern` local (entry p = block at place p), or None."""
    return None if pattern.remap is None else list(pattern.remap)


def read_table(path: Path) -> Table:
    """Read a block table: `.npy`, `.json` (list of rows), or text with one row of digits a line.

    Raises:
        ValueError: If the file is missing or is not a rectangle of 0, 1, 2.
    """
    read = {".npy": _array, ".json": _from_json}.get(path.suffix, _from_text)
    try:
        return read(path)
    except OSError as error:
        why = f"cannot be read ({error.strerror or error})"
    except UnicodeDecodeError:
        why = "is no text"
    except ValueError as error:
        why = str(error)
    raise ValueError(f"table: file {str(path)!r} {why}; {_TABLE_RULE}")


_TABLE_RULE = (
    f"it must be a rectangle of 1..{_MOST_BLOCKS} rows and columns of 0 (EMPTY), 1 (FULL), "
    "2 (CAUSAL), "
    "as .npy, .json or lines of digits such as 200 / 120 / 112"
)


def _array(path: Path) -> Table:
    try:
        cells = np.asarray(np.load(BytesIO(read_regular(path)), allow_pickle=False))
    except (ValueError, EOFError):  # numpy says of it that it may be a pickle
        raise ValueError("holds no array as numpy.save writes one") from None
    if cells.ndim != 2:
        raise ValueError(f"holds an array of shape {cells.shape}")
    _check_size(*cells.shape)
    if cells.dtype.kind not in "iu":
        raise ValueError(f"holds numbers of type {cells.dtype}")
    wrong = np.argwhere(~np.isin(cells, (EMPTY, FULL, CAUSAL)))
    if len(wrong):
        row, column = wrong[0]
        raise ValueError(f"has {cells[row, column]} in row {row + 1}, column {column + 1}")
    return np.asarray(cells, dtype=np.int8)


def _from_json(path: Path) -> Table:
    try:
        rows = json.loads(read_regular(path).decode())
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON ({error})") from None
    except RecursionError:
        raise ValueError("is nested too deeply to be read") from None
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError("holds no list of rows")
    for number, row in enumerate(rows, start=1):
        for column, cell in enumerate(row, start=1):
            if type(cell) is not int or cell not in (EMPTY, FULL, CAUSAL):
                raise ValueError(f"has {json.dumps(cell)} in row {number}, column {column}")
    return _rectangle([(f"row {number}", row) for number, row in enumerate(rows, start=1)])


def _from_text(path: Path) -> Table:
    rows = []
    for number, line in enumerate(read_regular(path).decode().splitlines(), start=1):
        digits = "".join(line.split())
        if other := digits.strip("012"):  # begins with the first other character
            raise ValueError(f"has {other[0]!r} in line {number}")
        if digits:
            rows.append((f"line {number}", [int(digit) for digit in digits]))
    return _rectangle(rows)


def _rectangle(rows: Sequence[tuple[str, Sequence[int]]]) -> Table:
    """Make a table of rows and their places in the file."""
    first, width = (rows[0][0], len(rows[0][1])) if rows else ("", 0)
    _check_size(len(rows), width)
    for place, row in rows:
        if len(row) != width:
            raise ValueError(f"has {len(row)} blocks in {place}, but {width} in {first}")
    return np.array([row for _, row in rows], dtype=np.int8)


def _check_size(rows: int, columns: int) -> None:
    if not (1 <= rows <= _MOST_BLOCKS and 1 <= columns <= _MOST_BLOCKS):
        raise ValueError(f"has {rows} rows of {columns} blocks")


def _indices(blocks: int) -> tuple[Ints, Ints]:
    index = np.arange(blocks, dtype=np.int64)
    return index[:, None], index[None, :]


def _full_where(mask: Bools) -> Table:
    return np.where(mask, FULL, EMPTY).astype(np.int8)


def _mask(
    table: Table, seqlen_q: int, seqlen_kv: int, remap: tuple[int, ...] | None = None
) -> BuiltMask:
    bands = table_bands(table, seqlen_q, seqlen_kv)
    return BuiltMask(bands=bands, predicate=TableMask(table, seqlen_q, seqlen_kv), remap=remap)


def _strided_original(values: Values, seqlen_q: int, seqlen_kv: int) -> BuiltMask:
    blocks, stride, local = (int(values[name]) for name in ("blocks", "stride", "local"))
    order = strided_order(blocks, stride)
    return _mask(strided_table(blocks, stride, local), seqlen_q, seqlen_kv, order)


def _strided(values: Values, seqlen_q: int, seqlen_kv: int) -> BuiltMask:
    blocks, stride, local = (int(values[name]) for name in ("blocks", "stride", "local"))
    order = np.array(strided_order(blocks, stride))
    return _mask(strided_table(blocks, stride, local)[np.ix_(order, order)], seqlen_q, seqlen_kv)


def _global_local(values: Values, seqlen_q: int, seqlen_kv: int) -> BuiltMask:
    blocks, local, global_ = (int(values[name]) for name in ("blocks", "local", "global"))
    return _mask(global_local_table(blocks, local, global_), seqlen_q, seqlen_kv)


def _star(values: Values, seqlen_q: int, seqlen_kv: int) -> BuiltMask:
    return _mask(star_table(int(values["blocks"])), seqlen_q, seqlen_kv)


def _streaming(values: Values, seqlen_q: int, seqlen_kv: int) -> BuiltMask:
    table = streaming_table(int(values["blocks"]), int(values["local"]))
    return _mask(table, seqlen_q, seqlen_kv)


def _table(values: Values, seqlen_q: int, seqlen_kv: int) -> BuiltMask:
    return _mask(read_table(Path(values["file"])), seqlen_q, seqlen_kv)


def _blocks(default: int) -> Parameter:
    return whole_parameter(default, least=1, most=_MOST_BLOCKS)


def _path(value: str) -> str:
    if not value:
        raise ValueError("must be a path; try table:file=my_table.txt")
    return value


_STRIDED_PARAMETERS = {
    "blocks": _blocks(16),
    "stride": whole_parameter(4, least=1),
    "local": whole_parameter(3, least=1),
}

STRIDED = Kind(
    summary="blocks a stride apart, gathered by residue (block diagonal)",
    build=_strided,
    parameters=_STRIDED_PARAMETERS,
)
STRIDED_ORIGINAL = Kind(
    summary="strided before its remap: blocks a stride apart, in token order",
    build=_strided_original,
    parameters=_STRIDED_PARAMETERS,
)
GLOBAL_LOCAL = Kind(
    summary="first row and column of blocks and the diagonal, not causal",
    build=_global_local,
    parameters={
        "blocks": _blocks(16),
        "local": whole_parameter(1, least=1),
        "global": whole_parameter(1, least=0),
    },
)
STAR = Kind(
    summary="first column of blocks and a causal diagonal",
    build=_star,
    parameters={"blocks": _blocks(4)},
)
STREAMING = Kind(
    summary="first column of blocks, a few blocks before the diagonal, a causal diagonal",
    build=_streaming,
    parameters={"blocks": _blocks(8), "local": whole_parameter(3, least=1)},
)
TABLE = Kind(
    summary="your own table of 0 EMPTY, 1 FULL, 2 CAUSAL from a file",
    build=_table,
    parameters={"file": Parameter(default=None, canonical=_path)},
    sample=None,
)
