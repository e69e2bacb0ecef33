"""The step that all methods share. :mod:`dlion.methods` defines messages and updates.

Read ``optimizer.py`` first: collect gradients, encode, exchange, update. ``overlap.py`` exists for
``overlap=True`` alone; ``lockstep.py`` compares processes; ``saving.py`` is the state dict.
"""
