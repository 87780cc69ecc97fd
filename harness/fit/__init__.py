"""Fit a calibration from measured tables: kernels and links first, then effects of whole runs."""
