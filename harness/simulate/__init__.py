"""Seconds of a plan on a cluster."""
