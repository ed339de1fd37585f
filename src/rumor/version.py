"""What this is the version of."""

VERSION = "0.1.0"
