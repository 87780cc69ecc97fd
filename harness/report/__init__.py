"""From records to tables and summaries."""
