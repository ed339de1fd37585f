"""Rumor inside other libraries, one file each. Importing rumor imports none of them."""
