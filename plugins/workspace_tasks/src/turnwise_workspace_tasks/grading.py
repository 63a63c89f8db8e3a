"""
Runs the hidden tests of a task in the workspace in which the agent worked.

The agent must have ended. Its processes are killed, the folders of the tests and of the results are emptied, the test
files are copied, and then the command runs with a clean environment. After the command its processes are killed, too,
before the results are read.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen

from turnwise import Report
from turnwise_workspace_tasks.config import RewardConfig
from turnwise_workspace_tasks.graded_task import Solution, Tests
from turnwise_workspace_tasks.results import MAX_RESULT_BYTES, ResultError, Results, read_result
from turnwise_workspaces import Command, ExecResult, Workspace, WorkspaceFileError

_PREPARE_S: Final = 60.0
_MAX_NAMED: Final = 100
"""Failed tests that a report names."""
_SHELL: Final = "/bin/sh"
_HOME: Final = "/logs/home"
# Not by the names that a shell would search: the agent cannot write where they are.
_EMPTY: Final = """
PATH=/bin:/usr/bin:/sbin:/usr/sbin; export PATH
for d in "$@"; do
  [ -L "$d" ] && rm -f "$d"
  [ -d "$d" ] || rm -rf "$d"
  mkdir -p "$d" && chmod u+rwx "$d" || exit 1
  chmod -R u+rwx "$d"
  rm -rf "$d"  # a mount stays, and is empty; the names of all its files may be too long for a command
  mkdir -p "$d" && chmod 755 "$d" || exit 1  # a mount lets every user write
  [ -z "$(ls -A "$d")" ] || exit 1
done 2>/dev/null
"""


@frozen(kw_only=True)
class Grade:
    """
    The result of a task's tests.

    Attributes:
        value: the score.
        results: as the tests wrote them; None if there are none that can be read.
        problem: why there are none, or why they do not count; one line, empty without one.
        output: of the tests, at most its first 4 MiB.
        exit_code: of the tests; None if they did not run, or were killed at the end of their time.
        wall_s: seconds of the tests.
    """

    value: float = 0.0
    results: Results | None = None
    problem: str = ""
    output: str = ""
    exit_code: int | None = None
    wall_s: float = 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers of the grade for the metrics of an episode."""
        passed = [] if self.results is None else list(self.results.passed.values())
        found = {"tests_wall_s": self.wall_s, "tests_not_counted": float(bool(self.problem))}
        if passed:
            found |= {"tests_passed": float(sum(passed)), "tests_failed": float(len(passed) - sum(passed))}
        if self.results is not None:
            found |= {f"tests_{name}": value for name, value in self.results.numbers.items()}
        return found

    def report(self, max_characters: int) -> Report:
        """Return what people see: the problem, the tests that failed, and the end of the output."""
        passed = {} if self.results is None else self.results.passed
        failed = [name for name, good in passed.items() if not good]
        facts: dict[str, str | float] = {"reward": self.value}
        if passed:
            facts |= {"passed": float(len(passed) - len(failed)), "failed": float(len(failed))}
        code = "none" if self.exit_code is None else f"{self.exit_code}"
        facts |= {"exit code": code, "seconds": round(self.wall_s, 3)}
        end = self.output if len(self.output) <= max_characters else f"…{self.output[-max_characters:]}"
        more = len(failed) - _MAX_NAMED
        names = [*failed[:_MAX_NAMED], *([f"… {more} tests more"] if more > 0 else [])]
        parts = [self.problem, "\n".join(f"failed: {name}" for name in names), end if max_characters else ""]
        text = "\n".join(filter(None, parts))
        return Report(title="tests", text=text, facts=facts, failed=bool(self.problem or failed or not self.value))


async def grade(workspace: Workspace, tests: Tests, config: RewardConfig) -> Grade:
    """
    Grade a workspace whose agent has ended.

    Whatever the agent left there gives a grade: when its files keep the tests from running, the value is 0.

    Raises:
        InfrastructureError: the workspace is lost.
    """
    await workspace.end_processes()
    if problem := await _prepare(workspace, tests):
        return Grade(problem=problem)
    done = await workspace.exec(_test_command(tests, config))
    await workspace.end_processes()
    output = done.stdout.decode(errors="replace")
    if problem := _why_not_counted(done):
        return Grade(problem=problem, output=output, exit_code=done.exit_code, wall_s=done.wall_s)
    try:
        results = await _read_results(workspace, tests, done)
    except (ResultError, WorkspaceFileError) as error:
        problem = " ".join(str(error).split())
        return Grade(problem=problem, output=output, exit_code=done.exit_code, wall_s=done.wall_s)
    value = results.score(tests.must_pass, fraction=config.score == "fraction")
    return Grade(value=value, results=results, output=output, exit_code=done.exit_code, wall_s=done.wall_s)


async def solve(workspace: Workspace, solution: Solution, timeout_s: float) -> ExecResult:
    """Run the reference solution of a task."""
    for path, data in solution.files.items():
        await workspace.write(path, data)
    return await workspace.exec(
        Command(argv=solution.command, timeout_s=timeout_s, environment=solution.environment, max_output_bytes=2**16)
    )


async def _prepare(workspace: Workspace, tests: Tests) -> str:
    """Bring the test files; return why this fails, empty if it does not."""
    done = await workspace.exec(Command(argv=(_SHELL, "-c", _EMPTY, _SHELL, *tests.fresh), timeout_s=_PREPARE_S))
    if done.exit_code != 0:
        return "the folders of the tests and of the results cannot be emptied"
    try:
        for path, data in tests.files.items():
            await workspace.write(path, data)
        for path in tests.results[:1] or (f"{_HOME}/.keep",):  # so that the folder of the results is there
            await workspace.write(f"{path.rpartition('/')[0]}/.keep", b"")
        await workspace.write(f"{_HOME}/.keep", b"")
    except WorkspaceFileError as error:
        return f"the test files cannot be written: {error}"
    return ""


def _test_command(tests: Tests, config: RewardConfig) -> Command:
    environment = {
        "HOME": _HOME,
        "TMPDIR": _HOME,
        "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        **({"PATH": config.path} if config.path else {}),
        **tests.environment,
        **config.environment,
    }
    return Command(
        argv=tests.command,
        timeout_s=config.timeout_s or tests.timeout_s,
        max_output_bytes=MAX_RESULT_BYTES,
        environment=environment,
    )


def _why_not_counted(done: ExecResult) -> str:
    if done.timed_out:
        return "the tests took too long, and were killed"
    if done.limit:
        return f"the tests passed the workspace's limit of {done.limit}, and were killed"
    if done.exit_code is not None and done.exit_code < 0:
        return f"the tests were killed by signal {-done.exit_code}"
    return ""


async def _read_results(workspace: Workspace, tests: Tests, done: ExecResult) -> Results:
    if tests.result == "exit_code":
        return Results(value=float(done.exit_code == 0))
    if tests.result == "pytest":
        if done.truncated:  # the summary is at the end
            raise ResultError(f"the output: has more than {MAX_RESULT_BYTES // 2**20} MiB, and no end")
        return read_result("pytest", "the output", done.stdout)
    for path in tests.results:
        try:
            data = await workspace.read(path, max_bytes=MAX_RESULT_BYTES + 1)
        except WorkspaceFileError:
            continue
        if len(data) > MAX_RESULT_BYTES:
            raise ResultError(f"{path}: has more than {MAX_RESULT_BYTES // 2**20} MiB")
        return read_result(tests.result, path, data)
    raise ResultError(f"the tests wrote no result: {' and '.join(tests.results)} cannot be read")
