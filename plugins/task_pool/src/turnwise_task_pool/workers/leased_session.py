"""Sessions whose agents hold leases."""

from __future__ import annotations

from turnwise_gateway.control.recorded_session import RecordedSession
from turnwise_task_pool.pool.store import Lease

LeasedSession = RecordedSession[Lease]
"""A session whose agent holds a lease."""
