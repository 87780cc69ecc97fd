"""Whole layers for a user's own model: what they are given, and the two ways they run."""
