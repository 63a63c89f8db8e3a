"""Functions as people type them, which return their argument: a process imports them, and annotations are texts."""

from __future__ import annotations

import enum
import ipaddress
import typing
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NewType, Optional, Union
from uuid import UUID

import attrs
import pydantic
import typing_extensions
from pydantic import Field


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Unit(enum.StrEnum):
    METRE = "m"
    FOOT = "ft"


@dataclass
class Item:
    name: str
    price: Decimal = Decimal("1.50")
    tags: set[str] = field(default_factory=set)


@dataclass
class Cart:
    """A cart of a shop."""

    items: list[Item]
    day: date | None = None


@attrs.frozen
class Point:
    """A point on a map."""

    x: float
    y: float = 0.0
    _label: str = attrs.field(default="", validator=attrs.validators.max_len(3))
    inner: Point | None = None


class User(pydantic.BaseModel):
    name: str
    age: int = Field(ge=0, description="In years.")
    born: date | None = None


class Movie(typing.TypedDict):
    title: str
    year: typing.NotRequired[int]


class Song(typing_extensions.TypedDict, total=False):
    title: typing_extensions.Required[str]
    length: timedelta


@dataclass
class Shelf:
    movies: list[Movie]
    corner: Point | None = None


class Pair(NamedTuple):
    first: int
    second: str = "b"


@dataclass
class Node:
    value: int
    children: list[Node] = field(default_factory=list)


@attrs.define
class Tree:
    value: int
    left: Tree | None = None
    right: Tree | None = None


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    tricks: list[str]


UserId = NewType("UserId", int)


def text(x: str) -> object:
    return x


def number(x: int) -> object:
    return x


def real(x: float = 0.5) -> object:
    return x


def flag(x: bool = False) -> object:
    return x


def anything(x: Any) -> object:
    return x


def ints(x: list[int]) -> object:
    return x


def plain_list(x: list) -> object:
    return x


def plain_dict(x: dict) -> object:
    return x


def prices(x: dict[str, float]) -> object:
    return x


def by_number(x: dict[int, str]) -> object:
    return x


def nested(x: dict[str, list[dict[str, int]]]) -> object:
    return x


def sequence(x: Sequence[str]) -> object:
    return x


def iterable(x: Iterable[int]) -> object:
    return x


def collection(x: Collection[int]) -> object:
    return x


def mapping(x: Mapping[str, date]) -> object:
    return x


def pair(x: tuple[int, str]) -> object:
    return x


def many(x: tuple[int, ...]) -> object:
    return x


def unique(x: set[int]) -> object:
    return x


def frozen(x: frozenset[str]) -> object:
    return x


def moment(x: datetime) -> object:
    return x


def day(x: date) -> object:
    return x


def hour(x: time) -> object:
    return x


def duration(x: timedelta) -> object:
    return x


def decimal(x: Decimal) -> object:
    return x


def unique_id(x: UUID) -> object:
    return x


def data(x: bytes) -> object:
    return x


def path(x: Path = Path("/tmp")) -> object:
    return x


def address(x: ipaddress.IPv4Address) -> object:
    return x


def color(x: Color = Color.BLUE) -> object:
    return x


def level(x: Level) -> object:
    return x


def unit(x: Unit) -> object:
    return x


def colors(x: dict[str, list[Color]]) -> object:
    return x


def choice(x: Literal["a", "b"]) -> object:
    return x


def single(x: Literal["only"]) -> object:
    return x


def mixed(x: Literal[1, True, "a", None]) -> object:
    return x


def member(x: Literal[Color.RED]) -> object:
    return x


def optional(x: Optional[int] = None) -> object:  # noqa: UP045 - the old spelling
    return x


def implicit(x: int = None) -> object:  # noqa: RUF013 - as people type it
    return x


def either(x: Union[int, str]) -> object:  # noqa: UP007 - the old spelling
    return x


def day_or_text(x: date | str) -> object:
    return x


def color_or_text(x: Color | str | None) -> object:
    return x


def item(x: Item) -> object:
    return x


def items(x: list[Item]) -> object:
    return x


def cart(x: Cart) -> object:
    return x


def point(x: Point) -> object:
    return x


def points(x: dict[str, Point]) -> object:
    return x


def user(x: User) -> object:
    return x


def movie(x: Movie) -> object:
    return x


def song(x: Song) -> object:
    return x


def shelf(x: Shelf) -> object:
    return x


def named_pair(x: Pair) -> object:
    return x


def node(x: Node) -> object:
    return x


def tree(x: Tree) -> object:
    return x


def pet(x: Annotated[Cat | Dog, Field(discriminator="kind")]) -> object:
    return x


def user_id(x: UserId) -> object:
    return x


def bounded(x: Annotated[int, Field(description="Most results.", ge=0, le=10)] = 5) -> object:
    return x


def with_field(x: int = Field(3, description="Most results.", ge=0)) -> object:
    return x


def described(x: Annotated[list[int], "all numbers"]) -> object:
    return x


def aliased(x: Annotated[int, Field(alias="from")]) -> object:
    return x


def keyword_only(*, x: int) -> object:
    return x


def not_a_number(x: float = float("nan")) -> object:
    return x


def sentinel(x: int = object()) -> object:
    return x


def defaults(x: frozenset[Color] = frozenset({Color.RED}), y: tuple[Decimal, ...] = (Decimal(1),)) -> object:
    return x


async def awaited(x: date) -> object:
    """Return the day."""
    return x


def documented(x: date, y: Point | None = None) -> object:
    """
    Find a day.

    Args:
        x: The day, as in 2024-02-01.
        y: The place.
    """
    return x


def through(func):
    @wraps(func)
    def inner(**keywords):
        return func(**keywords)

    return inner


@through
def wrapped(x: set[date]) -> object:
    return x


class Shop:
    def find(self, x: UUID) -> object:
        """Find a thing."""
        return x

    def __call__(self, x: Decimal) -> object:
        """Buy a thing."""
        return x

    @classmethod
    def of_class(cls, x: Color) -> object:
        return x

    @staticmethod
    def static(x: Pair) -> object:
        return x


def scaled(x: Decimal, factor: int) -> object:
    return x


three_times = partial(scaled, factor=3)


def count(to: int) -> Iterator[int]:
    """Count."""
    yield from range(to)


def lines(to: int) -> Iterator[str]:
    """Write lines."""
    for each in range(to):
        yield f"{each}\n"


async def count_async(to: int) -> AsyncIterator[int]:
    """Count."""
    for each in range(to):
        yield each


def endless(to: int) -> Iterator[int]:
    """Count for ever."""
    while True:
        yield to
