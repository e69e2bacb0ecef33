"""The step that all methods share. :mod:`dlion.methods` fills in what a worker sends and does.

Read ``optimizer.py`` first: collect gradients, encode, exchange, update. ``overlap.py`` exists for
``overlap=True`` alone; ``lockstep.py`` compares processes; ``saving.py`` is the state dict.
"""
