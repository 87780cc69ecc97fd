"""Suites of cells, and the simulation of those that are simulated."""
