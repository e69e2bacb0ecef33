"""Methods that are there to compare with, with all that only they need."""
