"""A model of large runs on Ray, which `scale_limits.py` uses and `scale_check.py` compares with real runs."""
