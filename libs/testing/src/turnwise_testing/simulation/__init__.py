"""
Simulation: the real local runtime under random orders of events, delays and faults, in virtual time.

A seed decides a run, and a failure prints the command that repeats it. `scheduler` runs threads one at a time, `loop`
is the event loop, `patches` replaces locks and clocks, and `scenario` runs and compares. `rollouts` and `replicas` are
the scenarios of the core. FoundationDB's simulation and shuttle (github.com/awslabs/shuttle) are the models.
"""
