"""What a run leaves behind: its files, its logger, and where it came from."""
