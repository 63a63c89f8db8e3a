"""
The task pool: outside agents lease tasks, and their scores come back.

`TaskPool` is for one event loop, `SqliteStore` keeps its state in a file, and `build_control_app` serves it over HTTP.
"""
