"""Passes: from a plan to a plan that computes the same, in fewer or other tasks."""
