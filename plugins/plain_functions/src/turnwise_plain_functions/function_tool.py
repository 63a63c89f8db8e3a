"""
Tools made from typed Python functions.

A sync function runs in a thread, so a blocking one delays only its own episode. In a process it can be killed as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast, get_args, overload

from attrs import evolve, field, frozen

from turnwise.errors import ConfigError
from turnwise.threads import in_thread
from turnwise.types import JsonDict, JsonObject, Task, ToolResult, ToolSchema
from turnwise_plain_functions.parts import is_async, yields_async
from turnwise_plain_functions.process import check_importable, in_process
from turnwise_plain_functions.results import Yielded, as_result, finish, finish_on_loop

if TYPE_CHECKING:
    from turnwise_plain_functions.arguments import Arguments

RunIn = Literal["thread", "process", "loop"]
"""
The place where a function runs.

`thread`: the function may block and must be thread-safe. After the call's deadline its thread continues in the
background. `process`: the function may block and hang; at the deadline its process is killed. It must be importable,
and starts slower. `loop`: the function runs on the event loop and must not block, because that stops all other episodes
and deadlines.
"""


@frozen(kw_only=True, eq=False)
class FunctionTool:
    """
    A tool made from a Python function by `tool`; it has no sessions and gives no reward.

    Attributes:
        func: sync or async.
        schema: in OpenAI form.
        run_in: place where it runs, see `RunIn`.
    """

    func: Callable[..., Any]
    schema: ToolSchema
    run_in: RunIn = "thread"
    _arguments: Arguments | None = field(default=None, repr=False)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The function, as `inspect.unwrap` looks for it."""
        return self.func

    async def create(self, task: Task) -> None:
        """Do nothing: a function keeps no state between calls."""

    async def execute(self, session: object, arguments: JsonObject) -> ToolResult:
        if self.run_in == "process":
            convert = self._arguments is not None
            return await in_process(self.func, arguments, tool=_name_in(self.schema), convert=convert)
        keywords = self.keywords(arguments)
        yielded = Yielded()
        if self.run_in == "loop":
            return as_result(await finish_on_loop(self.func(**keywords), yielded))
        try:
            return as_result(await in_thread(lambda: finish(self.func(**keywords), yielded), {}))
        finally:
            yielded.given_up = True  # the thread of an abandoned call ends at the next value of its generator

    def keywords(self, arguments: JsonObject) -> JsonDict:
        """Return the arguments with the Python values that the function's annotations promise."""
        return dict(arguments) if self._arguments is None else self._arguments.convert(arguments)

    async def release(self, session: object) -> None: ...


@overload
def tool(
    func: Callable[..., object], *, name: str = ..., schema: ToolSchema | None = ..., run_in: RunIn | None = ...
) -> FunctionTool: ...
@overload
def tool(
    *, name: str = ..., schema: ToolSchema | None = ..., run_in: RunIn | None = ...
) -> Callable[[Callable[..., object]], FunctionTool]: ...
def tool(
    func: Callable[..., object] | None = None,
    *,
    name: str = "",
    schema: ToolSchema | None = None,
    run_in: RunIn | None = None,
) -> FunctionTool | Callable[[Callable[..., object]], FunctionTool]:
    """
    Make a tool of a typed function. Also a decorator, with options or without.

    The function may return a `ToolResult`, a string, None for no text, or anything else, which the model sees as JSON.
    The values of a generator function are one text, if all of them are texts, and otherwise a list.

    Args:
        func: sync or async.
        name: replaces the function's own name.
        schema: replaces the schema that `function_schema` makes; arguments are then passed as JSON values.
        run_in: place of execution; by default a thread for sync functions and the loop for async ones.

    Raises:
        ConfigError: one line that names the wrong parameter, the wrong part of the schema, or the reason why the
            function cannot run there.

    Example:
        >>> @tool
        ... def add(a: int, b: int = 1) -> int:
        ...     '''Add two numbers.'''
        ...     return a + b
        >>> add.schema["function"]["parameters"]["required"]
        ['a']
    """
    if func is None:
        return lambda given: tool(given, name=name, schema=schema, run_in=run_in)
    arguments = None
    if schema is None:
        from turnwise_plain_functions.annotations import function_schema  # pydantic would slow every command

        schema, arguments = function_schema(func, name)
    else:
        _refuse_mismatch(func, schema)
    made = FunctionTool(func=func, schema=schema, arguments=arguments)
    return placed(made, run_in or ("loop" if is_async(func) or yields_async(func) else "thread"))


def placed(made: FunctionTool, run_in: str) -> FunctionTool:
    """Return the same tool with another place of execution; `ConfigError` when it cannot run there."""
    name = _name_in(made.schema)
    if run_in not in get_args(RunIn):
        raise ConfigError(f"tool {name!r}: run_in must be one of {', '.join(get_args(RunIn))}, not {run_in!r}")
    if run_in == "process":
        check_importable(made.func, name)
    return evolve(made, run_in=cast("RunIn", run_in))


def _name_in(schema: ToolSchema) -> str:
    function = schema.get("function")
    return str(function.get("name")) if isinstance(function, Mapping) else "?"


def _refuse_mismatch(func: Callable[..., object], schema: ToolSchema) -> None:
    """Refuse a schema whose arguments the function could not be called with; the run checks its form."""
    try:
        body = schema["function"]["parameters"]
        names = [*body.get("required", ())], [*body.get("properties", ())]
    except (KeyError, TypeError, AttributeError):
        return
    signature = inspect.signature(func)
    for each in names:
        try:
            signature.bind(**dict.fromkeys(each))
        except TypeError as error:
            raise ConfigError(f"tool {_name_in(schema)!r}: its schema does not fit the function: {error}") from error
