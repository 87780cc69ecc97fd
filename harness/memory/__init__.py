"""Bytes that a plan holds on each rank, task by task."""
