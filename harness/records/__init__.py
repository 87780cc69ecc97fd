"""Configurations of cells, and the records of their results."""
