"""Processes: a team of ranks on this machine, or the ranks of a launcher."""
