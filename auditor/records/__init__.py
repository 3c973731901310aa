"""Store a run on disk and read it again."""
