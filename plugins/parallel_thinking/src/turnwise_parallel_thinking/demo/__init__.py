"""The tiny model's tasks, demonstrations and training. No hook imports this package."""
