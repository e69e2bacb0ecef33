"""Records of a run: its files, its logger and its provenance."""
