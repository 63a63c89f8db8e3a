"""From rewards to losses: advantages, policy losses, and the hooks by which plugins add more."""
