"""
Reads the tool calls of a turn: the parts that all formats share, and the format `hermes`.

A format is a `Grammar`, and `FormatParser` is the tool parser of one.
"""
