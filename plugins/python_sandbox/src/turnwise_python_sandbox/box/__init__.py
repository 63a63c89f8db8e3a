"""
The code that runs inside the sandbox's own interpreter: the fork server, and the confinement of each forked program.

Modules here import only the standard library, because that interpreter has an empty environment and no turnwise. The
host side uses `messages`, `frames` and `tree_removal` too.
"""
