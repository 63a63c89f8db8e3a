"""Finds the class of an agent loop, and makes the arguments that verl's worker gives it."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from turnwise import Resources
from turnwise.config.own_code import OwnCode
from turnwise.errors import ConfigError, describe
from turnwise_verl_bridge.class_files import accepted
from turnwise_verl_bridge.config import VerlAgentConfig

_TARGET: Final = "_target_"


@frozen
class LoopClass:
    """
    The class of a loop.

    Attributes:
        place: of the class, for errors.
        found: the class.
        options: keyword arguments for it, besides the worker's.
    """

    place: str
    found: Any
    options: Mapping[str, Any]


@frozen
class WorkerArguments:
    """
    Arguments that verl's worker gives every loop, made once.

    Attributes:
        keywords: by name; a class gets the ones that it takes.
        make_output: makes verl's `TokenOutput`.
    """

    keywords: Mapping[str, Any]
    make_output: Any


def find_loop(config: VerlAgentConfig) -> LoopClass:
    """
    Return the class that the options name.

    Raises:
        ConfigError: verl is not installed; or the class is not allowed, cannot be imported or is no agent loop.
    """
    if importlib.util.find_spec("verl") is None:
        raise ConfigError("agent 'verl' runs a loop of verl, which is not installed here: install verl beside turnwise")
    if config.file is None:
        loop = LoopClass(config.loop, _import(config.loop, config.modules), config.options)
    elif config.file.suffix == ".py":
        loop = _in_python_file(config, config.file)
    else:
        loop = _in_yaml_file(config, config.file)
    if not inspect.isclass(loop.found) or not inspect.iscoroutinefunction(getattr(loop.found, "run", None)):
        raise ConfigError(f"{loop.place}: it is no AgentLoopBase: expected a class with `async def run`")
    return loop


def _in_python_file(config: VerlAgentConfig, file: Path) -> LoopClass:
    if not config.loop.isidentifier():
        raise ConfigError(f"loop: expected the name of a class in {file}, got {config.loop!r}")
    place = f"{file}:{config.loop}"
    try:
        return LoopClass(place, OwnCode(modules=(str(file),)).find(place), config.options)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def _in_yaml_file(config: VerlAgentConfig, file: Path) -> LoopClass:
    """Return the class of an entry of verl's `agent_loop_config_path`, a list of `name`, `_target_` and arguments."""
    entries = _read_entries(file)
    names = [str(entry.get("name")) for entry in entries]
    if config.loop not in names and not (not config.loop and len(entries) == 1):
        raise ConfigError(f"{file}: there is no loop {config.loop!r}; it has {', '.join(names)}")
    entry = entries[names.index(config.loop) if config.loop else 0]
    place = f"{file}: {entry.get('name')}"
    if not isinstance(entry.get(_TARGET), str):
        raise ConfigError(f"{place}: expected '_target_', such as 'package.module.Name'")
    options = {name: value for name, value in entry.items() if name not in ("name", _TARGET)}
    try:
        return LoopClass(place, _import(entry[_TARGET], config.modules), {**options, **config.options})
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def _read_entries(file: Path) -> list[Mapping[str, Any]]:
    from omegaconf import OmegaConf

    try:
        entries = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except Exception as error:
        raise ConfigError(f"{file}: cannot be read: {describe(error)}") from error
    if not isinstance(entries, list) or not entries or not all(isinstance(each, dict) for each in entries):
        raise ConfigError(f"{file}: expected a list of sections with 'name' and '_target_', as verl reads it")
    return [{str(name): value for name, value in entry.items()} for entry in entries]


def _import(place: str, modules: Sequence[str]) -> Any:
    home, _, name = place.rpartition(".")
    if not home:
        raise ConfigError(f"expected 'package.module.Name', or a Python file in 'file', got {place!r}")
    if not any(home == each or home.startswith(f"{each}.") for each in modules):
        raise ConfigError(f"module {home!r} is not allowed; list it in 'modules', which has {', '.join(modules)}")
    try:
        module = importlib.import_module(home)
    except ImportError as error:
        hint = "; install it, or add its folder to PYTHONPATH" if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(f"{place} cannot be imported: {error}{hint}") from error
    except Exception as error:
        raise ConfigError(f"{place} cannot be imported: {describe(error)}") from error
    if not hasattr(module, name):
        raise ConfigError(f"module {home!r} has no {name!r}")
    return getattr(module, name)


def make_worker_arguments(config: VerlAgentConfig, resources: Resources) -> WorkerArguments:
    """
    Return the arguments of loops: verl's default config with the run's model and lengths, its tokenizer and tools.

    Raises:
        ConfigError: the run has no model, or verl refuses a value of the config.
    """
    if resources.model.path is None:
        raise ConfigError("agent 'verl' needs a model with a tokenizer: set model.path")
    from verl.experimental.agent_loop import agent_loop
    from verl.utils.dataset.rl_dataset import RLHFDataset

    settings = _make_config(config, resources)
    wrap = getattr(agent_loop, "DictConfigWrap", None) or getattr(agent_loop, "_DummyConfig", None)
    if wrap is None:
        raise ConfigError("this version of verl has another form of agent loops; 0.5 to 0.9 are supported")
    keywords: dict[str, object] = {
        "trainer_config": wrap(config=settings),
        "tokenizer": _load_tokenizer(resources),
        "processor": None,
        "dataset_cls": RLHFDataset,
        "data_config": wrap(settings.data),
        "hf_model_type": _model_type(resources),
    }
    if hasattr(agent_loop, "ToolListWrap"):
        keywords["tools"] = agent_loop.ToolListWrap(_load_tools(settings.actor_rollout_ref.rollout.multi_turn))
    return WorkerArguments(keywords, _output_class())


def make_loop(loop: LoopClass, arguments: WorkerArguments, server: object) -> Any:
    """Return a loop for one episode; a base class without `apply_chat_template` gets the method of verl 0.8."""
    keywords = accepted(loop.found, {**arguments.keywords, "server_manager": server, **loop.options})
    found = loop.found if hasattr(loop.found, "apply_chat_template") else _with_chat_template(loop.found)
    with redirect_stdout(io.StringIO()):  # earlier versions of verl print what they make
        return found(**keywords)


def _with_chat_template(found: type) -> type:
    return type(found.__name__, (found, _ChatTemplate), {"__module__": found.__module__, "__doc__": found.__doc__})


class _ChatTemplate:
    """The method of verl 0.6 to 0.8 by which loops encode messages; verl 0.9 has none."""

    tokenizer: Any
    loop: asyncio.AbstractEventLoop
    apply_chat_template_kwargs: Mapping[str, Any]

    async def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        images: object = None,
        videos: object = None,
        remove_system_prompt: bool = False,
        **_options: object,
    ) -> list[int]:
        """Return the ids of messages and the start of the model's turn, perhaps without a default system prompt."""
        if images is not None or videos is not None:
            raise ConfigError("the messages have images or videos, which no engine of turnwise takes")

        def encode(messages: Sequence[Mapping[str, object]], **options: object) -> list[int]:
            options = {"tokenize": True, "return_dict": False, **self.apply_chat_template_kwargs, **options}
            return list(self.tokenizer.apply_chat_template(list(messages), **options))

        ids: list[int] = await self.loop.run_in_executor(
            None, lambda: encode(messages, tools=tools, add_generation_prompt=True)
        )
        if not remove_system_prompt:
            return ids
        user = {"role": "user", "content": ""}
        once, twice = (encode([user] * number, add_generation_prompt=False) for number in (1, 2))
        return ids[2 * len(once) - len(twice) :]


def _make_config(config: VerlAgentConfig, resources: Resources) -> Any:
    """Return verl's `ppo_trainer` config with the values of the run, and then the values of the options."""
    import verl
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf, open_dict

    folder = Path(verl.__file__).parent / "trainer" / "config"
    try:
        with initialize_config_dir(config_dir=str(folder), version_base=None):
            settings = compose("ppo_trainer")
        given = {
            "actor_rollout_ref.model.path": str(resources.model.path),
            "actor_rollout_ref.model.trust_remote_code": resources.model.trust_remote_code,
            "actor_rollout_ref.rollout.prompt_length": resources.prompt_length,
            "actor_rollout_ref.rollout.response_length": resources.response_length,
            "actor_rollout_ref.rollout.calculate_log_probs": True,
            "data.max_prompt_length": resources.prompt_length,
            "data.max_response_length": resources.response_length,
            "data.apply_chat_template_kwargs": dict(resources.model.template_options),
        }
        with open_dict(settings):
            for name, value in {**given, **config.config}.items():
                OmegaConf.update(settings, name, value, merge=True, force_add=True)
    except Exception as error:
        raise ConfigError(f"verl's config cannot be made: {describe(error)}") from error
    rollout = settings.actor_rollout_ref.rollout
    for name in ("prompt_length", "response_length"):
        if rollout[name] != getattr(resources, name):
            raise ConfigError(
                f"config: actor_rollout_ref.rollout.{name} is {rollout[name]}, but rollout.{name} is"
                f" {getattr(resources, name)}; set rollout.{name} alone"
            )
    return settings


def _load_tokenizer(resources: Resources) -> Any:
    from verl.utils import hf_tokenizer

    model = resources.model
    try:
        tokenizer = hf_tokenizer(str(model.path), trust_remote_code=model.trust_remote_code)
        if model.chat_template is not None:
            tokenizer.chat_template = model.chat_template.read_text(encoding="utf-8")
    except Exception as error:
        raise ConfigError(f"model.path: verl cannot load the tokenizer: {describe(error)}") from error
    return tokenizer


def _model_type(resources: Resources) -> str | None:
    from transformers import AutoConfig

    try:
        found = AutoConfig.from_pretrained(str(resources.model.path)).model_type
    except (OSError, ValueError):  # a folder with a tokenizer only, for an engine elsewhere
        return None
    return str(found)


def _load_tools(multi_turn: Any) -> list[Any]:
    from verl.tools.tool_registry import load_all_tools

    try:
        with redirect_stdout(io.StringIO()):  # verl prints the schema of each tool
            return list(load_all_tools(multi_turn.tool_config_path, multi_turn.function_tool_path))
    except Exception as error:
        raise ConfigError(
            f"config: the tools of actor_rollout_ref.rollout.multi_turn cannot be made: {describe(error)}"
        ) from error


def _output_class() -> Any:
    """Return verl's `TokenOutput`, which has moved between its versions."""
    from verl.workers.rollout import replica

    return replica.TokenOutput
