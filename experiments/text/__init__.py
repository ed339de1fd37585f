"""The text study: LAMB, data, model, training and tables. See ../language_modeling.py."""
