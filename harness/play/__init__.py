"""Device programs at work: on a GPU's streams, over process groups, or under adverse timings."""
