"""Options of the reward `workspace_tests`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from attrs import field, frozen, validators

CLEAN_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@frozen(kw_only=True)
class RewardConfig:
    """
    Options of the reward `workspace_tests`.

    Attributes:
        score: `all` gives 1 when every test passes and else 0; `fraction` gives the part that passes. The number in a
            reward file stays as it is.
        timeout_s: seconds that the tests may take, in place of the ones that a task has.
        spare_s: seconds for the rest: a workspace that starts, the test files, the results.
        path: PATH of the tests; empty keeps the workspace's.
        environment: more variables of the tests.
        max_output_bytes: of the tests' output: its end in the report, and its beginning in the log.
        show_changes: report which files of the working folder the agent changed.
    """

    score: Literal["all", "fraction"] = field(default="all", validator=validators.in_(("all", "fraction")))
    timeout_s: float | None = field(default=None, validator=validators.optional(validators.gt(0.0)))
    spare_s: float = field(default=120.0, validator=validators.gt(0.0))
    path: str = CLEAN_PATH
    environment: Mapping[str, str] = field(factory=dict)
    max_output_bytes: int = field(default=2**14, validator=validators.ge(0))
    show_changes: bool = True
