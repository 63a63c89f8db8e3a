"""
Simulation: the real local runtime under random orders of events, delays and faults, in virtual time.

One seed is one run, which can be repeated exactly. `scheduler` runs threads one at a time, `loop` is the event loop,
`patches` replaces locks and clocks, and `scenario` runs and compares. Scenarios are in `rollouts` and its neighbours.
FoundationDB's simulation and shuttle (github.com/awslabs/shuttle) are the models.
"""
