"""A module's tensors as an engine sees them."""
