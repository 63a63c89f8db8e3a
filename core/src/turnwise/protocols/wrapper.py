"""The run that the hooks ``wrap_*`` get, and the base class of their wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar, cast

from attrs import field, frozen

from turnwise.protocols.resources import Resources
from turnwise.types import JsonObject

T = TypeVar("T")
Role = Literal["driver", "worker", "reward_worker", "replica"]
"""Role of a process. With the runtime local, the driver is the only one and has every part."""


@frozen(kw_only=True)
class RunInfo:
    """
    The run whose part is wrapped.

    Attributes:
        config: of the run as plain values, with all defaults; read-only.
        role: of this process.
        section: the plugin's own section of the config, see `turnwise.Section`.
        resources: that the factory of the part got.
    """

    config: JsonObject
    role: Role
    section: object = None
    resources: Resources = field(factory=Resources)

    def options(self, kind: type[T]) -> T:
        """Return `section`, an object of this class; `TypeError` if it is of another one."""
        if not isinstance(self.section, kind):
            raise TypeError(f"the section is no {kind.__name__}, but {self.section!r}: return it in config_section")
        return self.section


class _Forwarded:
    """An attribute of the part inside; attributes that a wrapper sets on itself come first."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: Wrapper[object] | None, _kind: type | None = None) -> Any:
        return self if wrapper is None else getattr(wrapper.inner, self._name)


class Wrapper(Generic[T]):
    """
    The base class of wrappers: it has every public attribute of the part inside, and a subclass overrides some.

    So a wrapper keeps the optional methods of a part, such as `suspend` of a tool, and methods that later versions of
    its protocol add. Example::

        class Timed(Wrapper[Engine]):
            async def generate(self, request):
                started = time.perf_counter()
                result = await self.inner.generate(request)
                seconds.append(time.perf_counter() - started)
                return result

    Attributes:
        inner: the part.
    """

    inner: T

    def __new__(cls, inner: T, *_options: object, **_named: object) -> Any:
        """Make the object, of a new class that has the attributes of the part."""
        # In the class, because `isinstance` of a protocol looks past `__getattr__` from Python 3.12 on.
        names = {name for name in dir(inner) if not name.startswith("_") and name != "inner" and not hasattr(cls, name)}
        members = {name: _Forwarded(name) for name in names}
        return super().__new__(type(cls.__name__, (cls,), {"__module__": cls.__module__, **members}))

    def __init__(self, inner: T) -> None:
        self.inner = inner

    @classmethod
    def around(cls, inner: T, *options: object) -> T:
        """Return a wrapper with the type of the part, which type checkers cannot tell."""
        return cast("Callable[..., T]", cls)(inner, *options)
