"""What the studies of networks share: runs, engines, results, modelled hours, tables and pictures. Their page is docs/networks.md."""
