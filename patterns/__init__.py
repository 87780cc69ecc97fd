"""Attention patterns: pure geometry over token positions; no torch.

`make_pattern("star:blocks=8", 4096)` names a pattern; `PATTERNS` is the table of names.
"""

from patterns import outside
from patterns.geometry import Band, Block, Chunk, Relation, band_area
from patterns.pattern import LONGEST, Pattern
from patterns.table import CAUSAL, EMPTY, FULL, refine, simplify
from patterns.tables import remap_order
from patterns.text import PATTERNS, file_of, is_spelled_out, kind_of, make_pattern, sampled

__all__ = [
    "CAUSAL",
    "EMPTY",
    "FULL",
    "LONGEST",
    "PATTERNS",
    "Band",
    "Block",
    "Chunk",
    "Pattern",
    "Relation",
    "band_area",
    "file_of",
    "is_spelled_out",
    "kind_of",
    "make_pattern",
    "outside",
    "refine",
    "remap_order",
    "sampled",
    "simplify",
]
