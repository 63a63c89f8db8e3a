"""The training processes: how they are placed, started, sharded and called."""
