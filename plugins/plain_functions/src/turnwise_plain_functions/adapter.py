"""Makes parts from functions that a config names or a program passes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from typing import Any

from attrs import frozen

from turnwise import Resources, structure
from turnwise.errors import ConfigError
from turnwise.types import JsonObject, ToolSchema
from turnwise_plain_functions.function_tool import FunctionTool, RunIn, placed, tool
from turnwise_plain_functions.parts import MAKERS, FunctionReward, refuse_generator


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
        return MAKERS[kind](_with_options(value, options, self.resources))


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
        _with_options(value, own, resources), {name: each for name, each in options.items() if name in OPTIONS}
    )


def _with_options(func: Callable[..., Any], options: JsonObject, resources: Resources) -> Callable[..., Any]:
    """Return a function with the options as keyword arguments, and the resources if it has such a parameter."""
    signature = inspect.signature(func)
    given: Mapping[str, Any] = {"resources": resources} if "resources" in signature.parameters else {}
    keywords = {**given, **options}
    try:
        signature.bind(object(), **keywords)
    except TypeError as error:
        raise ConfigError(f"the options do not fit {signature}: {error}") from error
    return update_wrapper(partial(func, **keywords), func) if keywords else func
