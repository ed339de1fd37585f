"""The parts of the logistic-regression study: problems, runs, transient stages, tables, pictures."""
