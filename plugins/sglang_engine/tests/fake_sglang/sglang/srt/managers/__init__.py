"""Part of the pretended SGLang."""
