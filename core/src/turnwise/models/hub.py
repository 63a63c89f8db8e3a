"""
Models of the hub of Hugging Face, by `huggingface_hub`: its cache, its variables and its token.

A model is downloaded as a snapshot of one commit. The cache keeps the list of the commit's files, so a later call finds
out without the network whether the snapshot has all files that a run needs.
"""

from __future__ import annotations

import errno
import logging
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from turnwise.errors import ConfigError, first_line
from turnwise.files import expanded
from turnwise.models.location import FoundModel, ModelSource
from turnwise.terminal import write_error

if TYPE_CHECKING:
    import huggingface_hub

_SMALL: Final = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "additional_chat_templates/*.jinja")
"""Config, tokenizer and chat templates."""
_WEIGHTS: Final = (
    ("model.safetensors",),
    ("model-*-of-*.safetensors", "model.safetensors.index.json"),
    ("*.safetensors",),
    ("pytorch_model.bin",),
    ("pytorch_model-*-of-*.bin", "pytorch_model.bin.index.json"),
)
"""Forms of the same weights, the best first. A repository may have several, of which one is downloaded."""
_SAID_BYTES: Final = 50_000_000
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def fetch(source: ModelSource, *, weights: bool) -> FoundModel:
    """
    Return the snapshot of a model; what the cache lacks is downloaded.

    Args:
        source: the model, whose path is its id.
        weights: the weights are needed too.

    Raises:
        ConfigError: it does not exist, may not be read, or cannot be downloaded; one line with the hint.
    """
    hub = _import_hub(source)
    with _clear_errors(hub, source), _without_retry_lines():
        api = hub.HfApi(library_name="turnwise")
        # A branch that was seen before means the same commit again if the hub cannot be reached.
        offline = hub.constants.HF_HUB_OFFLINE
        asked = source.commit or source.revision
        revision = api.resolve_revision(source.path, revision=asked, local_files_only=offline)
        folder = _snapshot(hub, api, source, revision.resolved, weights=weights)
        return FoundModel(folder, source.path, revision.resolved)


def select_files(files: Mapping[str, int], *, weights: bool, code: bool = False) -> list[str]:
    """
    Return the files of a repository that a run needs.

    Of weights in several forms, one is taken. Files of subfolders are other forms of the model, such as ONNX.

    Args:
        files: their sizes in bytes by path.
        weights: take the weights too.
        code: take Python files too, those of subfolders as well.
    """
    small = {each for each in files if _fits(each, _SMALL) and not each.endswith(".index.json")}
    forms = ([each for each in files if _fits(each, form)] for form in _WEIGHTS)
    found = next(filter(None, forms), []) if weights else []
    scripts = [each for each in files if each.endswith(".py")] if code else []
    return sorted({*small, *found, *scripts})


def _fits(file: str, patterns: tuple[str, ...]) -> bool:
    depth = len(PurePosixPath(file).parts)
    return any(fnmatchcase(file, each) and depth == len(PurePosixPath(each).parts) for each in patterns)


def has_weights(files: Mapping[str, int]) -> bool:
    """Return whether a repository has weights in a form that a run can load."""
    return any(_fits(file, form) for file in files for form in _WEIGHTS)


def weight_bytes(source: ModelSource) -> int | None:
    """Return the size of the weights of a snapshot whose small files are cached; None if the cache does not know."""
    if source.commit is None:
        return None
    hub = _import_hub(source)
    files = _cached_files(hub, source.path, source.commit)
    if files is None:
        return None
    chosen = {*select_files(files, weights=True)} - {*select_files(files, weights=False)}
    return sum(files[each] for each in chosen)


def is_cached(source: ModelSource, *, weights: bool) -> bool:
    """Return whether the cache has the whole snapshot; the network is not used. `ConfigError` without the library."""
    hub = _import_hub(source)
    api = hub.HfApi(library_name="turnwise")
    try:
        asked = source.commit or source.revision
        revision = api.resolve_revision(source.path, revision=asked, local_files_only=True)
    except hub.errors.RevisionResolutionError:
        return False
    return _cached_snapshot(hub, source, revision.resolved, weights=weights) is not None


def cache_of(source: ModelSource) -> Path:
    """Return the folder of the cache; `ConfigError` without the library."""
    return expanded(_import_hub(source).constants.HF_HUB_CACHE)


def _import_hub(source: ModelSource) -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        text = f"the model {source.path!r} of the hub needs `pip install 'turnwise[tokenizers]'`"
        raise ConfigError(f"{source.key}: {text}") from error
    return huggingface_hub


def _snapshot(hub: Any, api: huggingface_hub.HfApi, source: ModelSource, commit: str, *, weights: bool) -> Path:
    if (cached := _cached_snapshot(hub, source, commit, weights=weights)) is not None:
        return cached
    if hub.constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{source.key}: {_describe_offline(hub, source)}")
    files = _cached_files(hub, source.path, commit)
    if files is None:
        tree = api.list_repo_tree(source.path, recursive=True, revision=commit)
        files = {each.path: each.size for each in tree if isinstance(each, hub.hf_api.RepoFile)}
    if weights:
        _check_content(files, source)
    return _download(hub, source, commit, {each: files[each] for each in _chosen(files, source, weights=weights)})


def _chosen(files: Mapping[str, int], source: ModelSource, *, weights: bool) -> list[str]:
    return select_files(files, weights=weights, code=source.code)


def _check_content(files: Mapping[str, int], source: ModelSource) -> None:
    if not has_weights(files):
        text = "has no weights that can be loaded: neither safetensors nor pytorch_model.bin"
        if quantized := next((each for each in sorted(files) if each.endswith(".gguf")), None):
            text += f"; download its {quantized} and name that file instead"
        raise ConfigError(f"{source.key}: {source.path} {text}")
    if "config.json" not in files:
        raise ConfigError(f"{source.key}: {source.path} is not a model for transformers: it has no config.json")


def _cached_files(hub: Any, name: str, commit: str) -> dict[str, int] | None:
    try:
        return {each.path: each.size for each in hub.get_cached_repo_tree(name, revision=commit)}
    except hub.errors.CachedRepoTreeNotFoundError:
        return None


def _cached_snapshot(hub: Any, source: ModelSource, commit: str, *, weights: bool) -> Path | None:
    """Return the folder of a snapshot in the cache if it is whole."""
    files = _cached_files(hub, source.path, commit)
    if weights and files is not None and not has_weights(files):
        return None
    chosen = None if files is None else [*map(_escape, _chosen(files, source, weights=weights))]
    try:
        options = {"revision": commit, "local_files_only": True, "allow_patterns": chosen}
        folder = Path(hub.snapshot_download(source.path, **options))
    except hub.errors.LocalEntryNotFoundError:
        return None
    if files is None:
        # An older program filled the cache and kept no list of the files; where the hub answers, it is asked for one.
        is_whole = hub.constants.HF_HUB_OFFLINE and _looks_whole(folder, weights=weights)
        return folder if is_whole else None
    return folder


def _looks_whole(folder: Path, *, weights: bool) -> bool:
    """Return whether a folder has a config, and all weights that its index names."""
    if not (folder / "config.json").is_file():
        return False
    present = {each.name: 0 for each in folder.iterdir() if each.is_file()}
    named: set[str] = set()
    for index in folder.glob("*.index.json"):
        named |= {*re.findall(r'"([^"/]+\.(?:safetensors|bin))"', index.read_text(encoding="utf-8"))}
    return not weights or (has_weights(present) and named <= present.keys())


def _escape(name: str) -> str:
    """Return a pattern that fits one name."""
    return re.sub(r"([*?[])", r"[\1]", name)


def _download(hub: Any, source: ModelSource, commit: str, files: Mapping[str, int]) -> Path:
    cache = expanded(hub.constants.HF_HUB_CACHE)
    missing = sum(files.values()) - _present_bytes(hub, source, commit, files)
    _check_room(source, cache, missing)
    where = f"{source.path} at {commit[:12]} ({_as_text(missing)})"
    # Bars are for a terminal; a log gets one line, and none of a tokenizer, which takes a moment.
    if missing > _SAID_BYTES or any(_fits(each, form) for each in files for form in _WEIGHTS):
        write_error(f"turnwise: downloading the model {where} from {hub.constants.ENDPOINT} to {cache}\n")
    options = {} if sys.stderr.isatty() else {"tqdm_class": _make_silent(hub)}
    patterns = [*map(_escape, files)]
    return Path(hub.snapshot_download(source.path, revision=commit, allow_patterns=patterns, **options))


def _present_bytes(hub: object, source: ModelSource, commit: str, files: Mapping[str, int]) -> int:
    """Return the bytes of a snapshot that the cache has; the library begins a file that was cut off anew."""
    return sum(size for name, size in files.items() if isinstance(_cached_file(hub, source, commit, name), str))


def _cached_file(hub: Any, source: ModelSource, commit: str, name: str) -> Any:
    return hub.try_to_load_from_cache(source.path, name, revision=commit)


def _check_room(source: ModelSource, cache: Path, size: int) -> None:
    existing = next(each for each in (cache, *cache.absolute().parents) if each.exists())
    free = shutil.disk_usage(existing).free
    if size > free:
        text = f"{source.path} needs {_as_text(size)}, and {cache} has {_as_text(free)} left"
        raise ConfigError(f"{source.key}: {text}; free some space, or set HF_HOME to another disk")


def _as_text(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _make_silent(hub: Any) -> Any:
    base: Any = hub.utils.tqdm

    class Silent(base):  # type: ignore[misc]  # its base is Any
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})

    return Silent


@contextmanager
def _without_retry_lines() -> Iterator[None]:
    """Keep the library from writing a line for each repeated request: the error at the end has the reason."""
    logger = logging.getLogger("huggingface_hub.utils._http")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _clear_errors(hub: object, source: ModelSource) -> Iterator[None]:
    """Turn the errors of the library into a `ConfigError` of one line."""
    try:
        yield
    except (ConfigError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise ConfigError(_describe(hub, source, error)) from error


def _describe(hub: Any, source: ModelSource, error: Exception) -> str:
    errors, endpoint, name = hub.errors, hub.constants.ENDPOINT, source.path
    if isinstance(error, errors.GatedRepoError):
        hint = f"accept its conditions at {endpoint}/{name}, then set HF_TOKEN or run `hf auth login`"
        return f"{source.key}: {name} is gated, and this machine may not read it: {hint}"
    if isinstance(error, errors.RepositoryNotFoundError):
        missing = f"there is no directory {str(source.file)!r}, and {endpoint} shows no model {name!r}"
        return f"{source.key}: {missing}: check the spelling, or set HF_TOKEN if the model is private"
    if isinstance(error, errors.RevisionNotFoundError):
        asked = source.commit or source.revision or "main"
        return f"{source.revision_key}: {name} has no revision {asked!r}; {endpoint}/{name}/tree/main lists them"
    return f"{source.key}: {_describe_transfer(hub, source, error)}"


def _describe_offline(hub: Any, source: ModelSource) -> str:
    hint = f"unset HF_HUB_OFFLINE, or run `hf download {source.path}` where there is a network"
    missing = f"{hub.constants.HF_HUB_CACHE} lacks {source.path} or a part of it"
    return f"there is no directory {str(source.file)!r}, HF_HUB_OFFLINE is set, and {missing}: {hint}"


def _describe_transfer(hub: Any, source: ModelSource, error: Exception) -> str:
    errors, endpoint, name, cache = hub.errors, hub.constants.ENDPOINT, source.path, hub.constants.HF_HUB_CACHE
    if hub.constants.HF_HUB_OFFLINE:
        return _describe_offline(hub, source)
    reason = first_line(_cause(error))
    if isinstance(error, errors.RevisionResolutionError):
        hint = f"check the network and HF_ENDPOINT, or give a folder with {name}"
        return f"{endpoint} cannot be reached, and {cache} lacks {name}: {reason}: {hint}"
    if isinstance(error, errors.HfHubHTTPError):
        status = getattr(getattr(error, "response", None), "status_code", None)
        denied = "HF_TOKEN is wrong or lacks the right to read it" if status in (401, 403) else "try again later"
        return f"{endpoint} refuses {name} with the status {status}: {denied}"
    if isinstance(error, errors.HFValidationError):
        return f"{name!r} is neither a directory nor the id of a model: {reason}"
    system = next((each for each in _chain(error) if _is_of_disk(each, hub)), None)
    if system is not None:
        hint = "free some space" if system.errno in _FULL else "make it writable"
        return f"{cache}: {system.strerror}: {hint}, or set HF_HOME to another disk"
    return f"the download of {name} from {endpoint} broke off: {reason}; the same command continues it"


def _chain(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _is_of_disk(error: BaseException, hub: Any) -> TypeGuard[OSError]:
    network = (hub.errors.HfHubHTTPError, hub.errors.EntryNotFoundError, ConnectionError, TimeoutError)
    if not isinstance(error, OSError) or isinstance(error, network):
        return False
    return error.errno in _FULL or error.filename is not None


def _cause(error: BaseException) -> BaseException:
    """Return the first error of a chain, which names the system's reason."""
    *_, last = _chain(error)
    return last
