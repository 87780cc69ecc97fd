"""Machines: GPUs, links and nodes from datasheets, and calibrations fitted to measurements."""
