"""Weight sources, sleep of engines, and the memory switch between engines and trainer."""
