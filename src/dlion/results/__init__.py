"""Records of runs, and what is made of them: loggers, curves, tables, figures."""
