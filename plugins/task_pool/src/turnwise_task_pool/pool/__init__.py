"""Rollouts of tasks, their leases and results, in memory or in a file; knows no run and no server."""
