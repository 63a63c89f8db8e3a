"""Processes of agents' programs: their start, their connections and their end."""
