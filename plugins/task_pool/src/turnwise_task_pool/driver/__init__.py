"""The pool of a run in the driver: the control port, and the workers that offer episodes."""
