"""The image study: data, networks, training and tables. See ../image_classification.py."""
