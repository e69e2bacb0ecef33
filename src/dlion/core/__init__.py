"""The step that all methods share: read ``collect`` and ``step`` of ``optimizer.py`` first."""
