"""The text study: LAMB, data, training, tables and pictures. See ../language_modeling.py."""
