"""Adapters to other projects' packages, imported inside the rank that runs them."""
