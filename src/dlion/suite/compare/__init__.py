"""Runs side by side: tables, curves, pages and dashboards, from the files that they left."""
