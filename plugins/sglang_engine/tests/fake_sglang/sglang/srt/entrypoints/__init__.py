"""Part of the fake SGLang."""
