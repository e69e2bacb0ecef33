"""The step that all methods share. :mod:`dlion.methods` defines messages and updates.

Read ``step.py`` first: collect gradients, encode, exchange, update. ``optimizer.py`` is the class
that users see and methods fill in; ``overlap.py`` exists for ``overlap=True`` alone, ``elastic.py``
for ``manager=``; processes compare ``header.py`` in every step; ``saving.py`` shows the state of
buckets and ``state_dicts.py`` packs and loads it.
"""
