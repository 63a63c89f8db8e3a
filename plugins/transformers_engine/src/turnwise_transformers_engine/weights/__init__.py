"""The weights of the engine: updates, adapters, sleep and the version that tokens get."""
