"""Measure this machine and write it down as a cluster."""
