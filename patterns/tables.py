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
from pathlib import Path

import numpy as np

from patterns.areas import Ints
from patterns.kind import Kind, Mask, Parameter, Values, whole
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
    try:
        if path.suffix == ".npy":
            cells = np.asarray(np.load(path, allow_pickle=False))
        else:
            text = path.read_text(encoding="utf-8")
            rows = json.loads(text) if path.suffix == ".json" else _digits(text)
            cells = np.array(rows)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"table: file {str(path)!r} cannot be read ({error}); {_TABLE_RULE}"
        ) from error
    if cells.ndim != 2 or not 1 <= min(cells.shape) <= max(cells.shape) <= _MOST_BLOCKS:
        raise ValueError(f"table: file {str(path)!r} has shape {cells.shape}; {_TABLE_RULE}")
    if cells.dtype.kind not in "iu" or not np.isin(cells, (EMPTY, FULL, CAUSAL)).all():
        raise ValueError(f"table: file {str(path)!r} holds other values; {_TABLE_RULE}")
    return np.asarray(cells, dtype=np.int8)


_TABLE_RULE = (
    f"it must be a rectangle of 1..{_MOST_BLOCKS} rows of 0 (EMPTY), 1 (FULL), 2 (CAUSAL), "
    "as .npy, .json or lines of digits such as 200 / 120 / 112"
)


def _digits(text: str) -> list[list[int]]:
    return [[int(digit) for digit in "".join(line.split())] for line in text.splitlines() if line]


def _indices(blocks: int) -> tuple[Ints, Ints]:
    index = np.arange(blocks, dtype=np.int64)
    return index[:, None], index[None, :]


def _full_where(mask: Bools) -> Table:
    return np.where(mask, FULL, EMPTY).astype(np.int8)


def _mask(
    table: Table, seqlen_q: int, seqlen_kv: int, remap: tuple[int, ...] | None = None
) -> Mask:
    bands = table_bands(table, seqlen_q, seqlen_kv)
    return Mask(bands=bands, predicate=TableMask(table, seqlen_q, seqlen_kv), remap=remap)


def _strided_original(values: Values, seqlen_q: int, seqlen_kv: int) -> Mask:
    blocks, stride, local = (int(values[name]) for name in ("blocks", "stride", "local"))
    order = strided_order(blocks, stride)
    return _mask(strided_table(blocks, stride, local), seqlen_q, seqlen_kv, order)


def _strided(values: Values, seqlen_q: int, seqlen_kv: int) -> Mask:
    blocks, stride, local = (int(values[name]) for name in ("blocks", "stride", "local"))
    order = np.array(strided_order(blocks, stride))
    return _mask(strided_table(blocks, stride, local)[np.ix_(order, order)], seqlen_q, seqlen_kv)


def _global_local(values: Values, seqlen_q: int, seqlen_kv: int) -> Mask:
    blocks, local, global_ = (int(values[name]) for name in ("blocks", "local", "global"))
    return _mask(global_local_table(blocks, local, global_), seqlen_q, seqlen_kv)


def _star(values: Values, seqlen_q: int, seqlen_kv: int) -> Mask:
    return _mask(star_table(int(values["blocks"])), seqlen_q, seqlen_kv)


def _streaming(values: Values, seqlen_q: int, seqlen_kv: int) -> Mask:
    table = streaming_table(int(values["blocks"]), int(values["local"]))
    return _mask(table, seqlen_q, seqlen_kv)


def _table(values: Values, seqlen_q: int, seqlen_kv: int) -> Mask:
    return _mask(read_table(Path(values["file"])), seqlen_q, seqlen_kv)


def _blocks(default: int) -> Parameter:
    return whole(default, least=1, most=_MOST_BLOCKS)


def _path(value: str) -> str:
    if not value:
        raise ValueError("must be a path; try table:file=my_table.txt")
    return value


_STRIDED_PARAMETERS = {
    "blocks": _blocks(16),
    "stride": whole(4, least=1),
    "local": whole(3, least=1),
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
    parameters={"blocks": _blocks(16), "local": whole(1, least=1), "global": whole(1, least=0)},
)
STAR = Kind(
    summary="first column of blocks and a causal diagonal",
    build=_star,
    parameters={"blocks": _blocks(4)},
)
STREAMING = Kind(
    summary="first column of blocks, a few blocks before the diagonal, a causal diagonal",
    build=_streaming,
    parameters={"blocks": _blocks(8), "local": whole(3, least=1)},
)
TABLE = Kind(
    summary="your own table of 0 EMPTY, 1 FULL, 2 CAUSAL from a file",
    build=_table,
    parameters={"file": Parameter(default=None, canonical=_path)},
)
