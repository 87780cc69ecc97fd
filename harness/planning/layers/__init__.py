"""Layers around attention in a plan: projections, checkpoints, chunks of heads or tokens."""
