"""The end of a worker: its attempts, and the sessions of agents that hold leases."""
