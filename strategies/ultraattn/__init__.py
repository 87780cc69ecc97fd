"""UltraAttn's planning: grids, who computes which block, remaps, and the proofs of their costs.

Source: UltraAttn (SC'25), "Efficiently Parallelizing Attention through Hierarchical
Context-Tiling"; the authors' code, `search_algo/workload_partition.py`.
"""
