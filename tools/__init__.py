"""What maintainers run alone: it keeps the pages that are written from recorded results."""
