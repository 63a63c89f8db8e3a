"""The forms that `model.path` may have, and a model on this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from attrs import frozen

from turnwise.files import expanded

GGUF_END: Final = ".gguf"
_ID: Final = re.compile(r"(?:[A-Za-z0-9_](?:[\w.-]*\w)?/)?[A-Za-z0-9_](?:[\w.-]*\w)?", re.ASCII)
_MAX_ID: Final = 96


@frozen(kw_only=True)
class ModelSource:
    """
    A model as a config or a command line names it.

    Attributes:
        path: a folder, a GGUF file, or the id of a model on the hub, such as `Qwen/Qwen3-0.6B`.
        base_dir: folder that a relative path starts from.
        revision: branch, tag or commit on the hub; None is its main branch.
        commit: commit that an earlier run found for the revision; None looks it up.
        code: the model's Python files are needed too.
        key: name of the path in error texts; that of the revision is derived from it.
    """

    path: str
    base_dir: Path
    revision: str | None = None
    commit: str | None = None
    code: bool = False
    key: str = "model.path"

    @property
    def revision_key(self) -> str:
        """Name of the revision in error texts."""
        return "--revision" if self.key.startswith("--") else f"{self.key.removesuffix('path')}revision"

    @property
    def file(self) -> Path:
        """The path, if it is one of this machine."""
        return self.base_dir / expanded(self.path)

    @property
    def is_on_hub(self) -> bool:
        """Whether the path is the id of a model on the hub: a file or folder of the same spelling comes first."""
        return self.commit is not None or (is_model_id(self.path) and not self.file.exists())


@frozen
class FoundModel:
    """
    A model on this machine.

    Attributes:
        folder: with config, tokenizer and, if they were asked for, weights.
        name: id on the hub, or the name of the folder or file.
        commit: of the hub; None for a local model.
    """

    folder: Path
    name: str
    commit: str | None = None


def is_model_id(text: str) -> bool:
    """Return whether a text has the form of an id on the hub: `NAME` or `OWNER/NAME`."""
    if len(text) > _MAX_ID or text.endswith((GGUF_END, ".git")) or "--" in text or ".." in text:
        return False
    return _ID.fullmatch(text) is not None
