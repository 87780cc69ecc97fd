"""Passes from plan to plan: fuse tiles, batch transfers, use collectives, choose an order."""
