"""Makes parts from functions that a config names or a program passes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from typing import Any, Final

from attrs import frozen

from turnwise import Resources, structure
from turnwise.errors import ConfigError
from turnwise.types import JsonObject, ToolSchema
from turnwise_plain_functions.function_tool import FunctionTool, RunIn, placed, tool
from turnwise_plain_functions.parts import MAKERS, FunctionReward, refuse_generator
from turnwise_plain_functions.peer_rewards import adapt_peer_reward, is_peer_reward

_GIVEN: Final[Mapping[str, str]] = {
    "agents": "the episode",
    "group_rewards": "the ended episodes of a task",
    "interactions": "the conversation",
    "postprocessors": "the batch",
    "rewards": "the episode",
}
"""By kind: what a function gets."""


@frozen(kw_only=True)
class ToolOptions:
    """
    Options of a function in `tools`.

    Attributes:
        run_in: `thread` for functions that may block, `process` for functions that may hang, `loop` for others; null
            runs sync functions in a thread and async ones on the loop.
        schema: replaces the schema from type hints and docstring, which the model sees.
    """

    run_in: RunIn | None = None
    schema: ToolSchema | None = None


@frozen
class FunctionAdapter:
    """Adapts functions, other callables, and the results of this package's decorators."""

    resources: Resources

    def adapt(self, kind: str, value: object, options: JsonObject) -> object | None:
        if kind == "tools" and (callable(value) or isinstance(value, FunctionTool)):
            return _adapt_tool(value, options)
        if kind == "rewards" and isinstance(value, FunctionReward):
            value = value.func
        if kind == "group_rewards" and callable(value):
            refuse_generator(value, "the function")
            return _adapt_group_reward(value, options, self.resources)
        if kind not in MAKERS or not callable(value):
            return None
        refuse_generator(value, "the function")
        if kind == "rewards" and is_peer_reward(value):
            return MAKERS[kind](adapt_peer_reward(_with_options(value, options), self.resources.chat))
        return MAKERS[kind](_with_options(value, options, self.resources, _GIVEN[kind]))


def _adapt_tool(value: Callable[..., object] | FunctionTool, options: JsonObject) -> FunctionTool:
    chosen = structure(options, ToolOptions)
    if not isinstance(value, FunctionTool):
        return tool(value, schema=chosen.schema, run_in=chosen.run_in)
    # A decorated function has its schema; the run replaces it, as it does for every tool.
    return placed(value, chosen.run_in) if chosen.run_in else value


def _adapt_group_reward(value: Callable[..., object], options: JsonObject, resources: Resources) -> object:
    # Imported here, because a run without group rewards needs nothing of it.
    from turnwise_plain_functions.group_reward import OPTIONS, group_reward

    own = {name: each for name, each in options.items() if name not in OPTIONS}
    return group_reward(
        _with_options(value, own, resources, _GIVEN["group_rewards"]),
        {name: each for name, each in options.items() if name in OPTIONS},
    )


def _with_options(
    func: Callable[..., Any], options: JsonObject, resources: Resources | None = None, given: str = ""
) -> Callable[..., Any]:
    """
    Return a function with the options as keyword arguments.

    Args:
        func: the function.
        options: of the config.
        resources: passed as well, if the function has such a parameter.
        given: the only positional argument, for the error; empty if all arguments go by name.
    """
    signature = inspect.signature(func)
    passed: Mapping[str, object] = {"resources": resources} if "resources" in signature.parameters else {}
    keywords = {**passed, **options}
    try:
        if given:
            signature.bind(object(), **keywords)
        else:
            signature.bind_partial(**keywords)
    except TypeError as error:
        hint = f"; the function gets {given} as its only positional argument" if given else ""
        raise ConfigError(f"the options do not fit {signature}: {error}{hint}") from error
    return update_wrapper(partial(func, **keywords), func) if keywords else func
