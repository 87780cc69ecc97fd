"""Solvers of the two tilings: which rank computes each block at the least cost."""
