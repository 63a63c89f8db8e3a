"""The command `turnwise check`."""
