"""Everything that a training writes for people: metrics, curves, tables, cards and the live view."""
