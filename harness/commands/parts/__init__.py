"""Parts of one verb each that would make its file too long."""
