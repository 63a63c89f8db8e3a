"""The folder of `turnwise gateway serve`: the config, the episodes, and the requests if they are kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from attrs import define, field

from turnwise import EpisodeResult, RunConfig
from turnwise.config.file import dump_yaml, with_absolute_paths
from turnwise.errors import ConfigError
from turnwise.files import partial_path, replace, write_text
from turnwise.types import TokenArray
from turnwise_gateway.serving.session_log import SESSIONS_FILE, LoggedSession, SessionLog
from turnwise_result_files import TrajectoryWriter, read_results
from turnwise_result_files.folder_lock import check_replaceable, make_folder, removed_folder, writing_to
from turnwise_result_files.resumption import CONFIG_FILE, TRAJECTORIES_FILE

CONTROL_FILE: Final = "control.json"
REQUESTS_DIR: Final = "requests"

Decode = Callable[[TokenArray], str]


@define(eq=False)
class ServedFolder:
    """
    The folder that a gateway writes to, locked against other runs.

    Attributes:
        path: of the folder.
        earlier: episodes of earlier parts.
        num_written: episodes of this part.
    """

    path: Path
    earlier: list[EpisodeResult] = field(factory=list)
    num_written: int = 0
    _writer: TrajectoryWriter | None = None

    def start(self, config: RunConfig, *, overwrite: bool) -> None:
        """Write the config of a new run; `ConfigError` if there are results that must not be replaced."""
        kept = ((self.path / SESSIONS_FILE), *(self.path / REQUESTS_DIR).glob("*.jsonl"))
        old = [file for file in (self._file, partial_path(self._file), *kept) if file.exists()]
        if old and not overwrite:
            text = "holds the results of another run; choose another folder, add --overwrite, or --resume it"
            raise ConfigError(f"--out {self.path}: {text}")
        check_replaceable(self.path, old, CONFIG_FILE)
        for file in old:
            file.unlink()
        write_text(self.path / CONFIG_FILE, dump_yaml(with_absolute_paths(config)))

    def resume(self, decode: Decode | None) -> None:
        """Read the episodes of earlier parts; the partial file of a killed one becomes complete."""
        partial = partial_path(self._file)
        found = [each for file in (self._file, partial) if file.exists() for each in read_results(file)]
        self.earlier = list({each.uid: each for each in found}.values())
        if partial.exists():
            rescued = self.path / f"rescued-{TRAJECTORIES_FILE}"
            with TrajectoryWriter(rescued, decode=decode) as writer:
                for result in self.earlier:
                    writer.write(result)
            replace(rescued, self._file)
            partial.unlink()

    @property
    def log(self) -> SessionLog:
        """File of the sessions."""
        return SessionLog(self.path / SESSIONS_FILE)

    def find_lost(self, sessions: Iterable[LoggedSession]) -> list[LoggedSession]:
        """Return the sessions that were open when the process before was killed."""
        written = {each.uid for each in self.earlier}
        return [each for each in sessions if not each.is_over and each.uid not in written]

    def numbers(self) -> Counter[str]:
        """Return the number of the next session for each uid."""
        numbers: Counter[str] = Counter()
        for result in self.earlier:
            numbers[result.task.uid] = max(numbers[result.task.uid], result.rollout_n + 1)
        return numbers

    @contextmanager
    def writing(self, decode: Decode | None) -> Iterator[None]:
        """Keep the file of episodes open inside the `with` statement; it has the earlier ones first."""
        self.refuse_removed()  # the writer would make the folder anew
        with TrajectoryWriter(self._file, decode=decode) as self._writer:
            for result in self.earlier:
                self._writer.write(result)
            yield

    def write(self, result: EpisodeResult) -> EpisodeResult:
        """Write an episode to the disk and return it as it was written; `DataError` if the folder was removed."""
        assert self._writer is not None, "episodes are written inside `writing`"
        self.refuse_removed()
        written = self._writer.write(result)
        self._writer.flush()
        self.num_written += 1
        return written

    def refuse_removed(self) -> None:
        """Raise `DataError` if the folder was removed: nothing would be left of the sessions."""
        if not (self.path / CONFIG_FILE).exists():
            raise removed_folder(self.path)

    @property
    def _file(self) -> Path:
        return self.path / TRAJECTORIES_FILE


@contextmanager
def locked_folder(path: Path) -> Iterator[ServedFolder]:
    """Make the folder if it is missing, and hold it inside the `with` statement; one line if that fails."""
    make_folder(path)
    with writing_to(path, f"turnwise gateway serve --resume {path} continues from the written episodes"):
        yield ServedFolder(path)
