"""Exchanges of the rivals."""
