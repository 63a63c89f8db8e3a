"""The commands `turnwise train`, `turnwise eval` and `turnwise export`."""
