"""What one cell of a sweep is called, and what it came to."""
