"""Tokenizers, templates, vocabularies, models and records for tests, without a download."""
