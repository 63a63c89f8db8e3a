"""The token record of an episode: columns, trajectory, layout checks, and the result that an episode leaves."""
