"""The configuration of a run: classes, files, conversion, errors and schema."""
