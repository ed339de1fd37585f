"""The logistic-regression study: problems, runs, transient stages, tables and pictures."""
