"""Support of a configuration, its volumes, and the nearest supported ones."""
