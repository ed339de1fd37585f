"""The shared parts of the two studies of networks: runs, engines, results, modelled hours, tables and pictures (docs/networks.md)."""
