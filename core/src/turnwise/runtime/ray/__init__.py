"""The runtime on Ray: all modules that import Ray or call actors."""
