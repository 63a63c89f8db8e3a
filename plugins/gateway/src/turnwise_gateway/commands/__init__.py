"""The command `turnwise gateway`, with `serve`, `pool` and `replay`."""
