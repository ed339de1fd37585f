"""The image study: data, networks, training on either engine, tables and pictures. See ../image_classification.py."""
