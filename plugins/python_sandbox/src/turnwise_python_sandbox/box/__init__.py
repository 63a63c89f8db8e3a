"""
What runs inside the sandbox's own interpreter: the fork server, and what each fork does to itself before model code.

Nothing here may import anything but the standard library: the interpreter is another one than turnwise's, started
with an empty environment. The supervisor's side uses `messages`, `frames` and `workspace` too.
"""
