"""The tiny model's world: its tasks, what it was taught, and how it was trained. No hook imports it."""
