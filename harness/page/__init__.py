"""Results as one self-contained HTML file: the answer, heat tables, charts, every cell."""
