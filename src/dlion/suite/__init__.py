"""The experiment suite: all that ``train.py`` and ``dlion`` need beside the library.

It needs ``pip install 'dlion[suite]'``. Nothing in the library imports it, but for
``dlion.load_model`` when that is called.

* ``launch``: the command line of ``train.py``, checks before a run, processes, resuming
* ``training``: the loop, evaluation, checkpoints, weights, faults, virtual workers
* ``compare``: tables, curves, figures and pages of several runs
* ``record``: files of a run and their readers, loggers, export
* ``models``: models that take their shape from the data set
* ``data``: data sets, their shards, text
* modules beside them: ``settings`` and ``config`` of a run, ``arguments`` and ``terminal`` of a
  command, ``files``, ``locks``, ``machine``, ``units``, ``predict`` (the time of a step)
"""
