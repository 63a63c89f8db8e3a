"""The surroundings in which checks call a part."""
