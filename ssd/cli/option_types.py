"""Derives the type of each flag from the type of its field."""

from __future__ import annotations

import json
import math
import re
from typing import Any, get_args

import click
from msgspec import inspect

from ssd.config.params import MAX_FAN_OUT, MAX_LOOKAHEAD, FanOutChoice, FanOutName
from ssd.system import registered


class Real(click.FloatRange):
    """A number in a range; nan is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


class Lookahead(click.IntRange):
    """A number; "auto" becomes 0."""

    name = "auto|N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value in ("auto", 0):
            return 0
        number: int = super().convert(value, param, ctx)
        return number


class NameList(click.types.StringParamType):
    """A name, repeated by flags, or separated by commas in an environment variable."""

    def split_envvar_value(self, rv: str) -> list[str]:
        return [name.strip() for name in rv.split(",")]


class FanOut(click.ParamType):
    """A tuple of numbers from "3", "3,2,1" or "[3,2,1]"; "auto" becomes (), other names stay."""

    name = "auto|theorem|pearl|N|list"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> FanOutChoice:
        if isinstance(value, tuple) or value in get_args(FanOutName):
            choice: FanOutChoice = value
            return choice
        if value in ("auto", ""):
            return ()
        numbers = re.sub(r"^\s*\[(.*)\]\s*$", r"\1", value).split(",")
        if not all(re.fullmatch(r"\s*\d{1,4}\s*", number) for number in numbers):
            self.fail(
                f"{value!r} is neither a number, nor a list such as 3,2,1, nor auto, theorem or pearl", param, ctx
            )
        fan_out = tuple(int(number) for number in numbers)
        if max(fan_out) > MAX_FAN_OUT:
            self.fail(f"{value!r}: each number must be in the range 0 to {MAX_FAN_OUT}", param, ctx)
        return fan_out


class LoadFormat(click.Choice[str]):
    """A load format, of the core or a plugin's; `help` has sentences about the plugins'."""

    def __init__(self) -> None:
        super().__init__([registered.AUTO, registered.DUMMY, *registered.names(registered.LOAD_FORMATS)])
        self.help = "".join(f" {each.HELP}" for each in registered.load_all(registered.LOAD_FORMATS).values())


SPECIAL: dict[str, click.ParamType] = {
    "num_speculative_tokens": Lookahead(1, MAX_LOOKAHEAD),
    "fan_out": FanOut(),
    "load_format": LoadFormat(),
    "executor": click.Choice(["local", *registered.names(registered.EXECUTORS)]),
}
"""Types of options with a word, "auto", for an empty default, or with names of plugins."""


def click_type(of: inspect.Type) -> click.ParamType:
    match of:
        case inspect.UnionType():  # with None
            return click_type(of.types[0])
        case inspect.LiteralType():
            return click.Choice(of.values)
        case inspect.BoolType():
            return click.BOOL
        case inspect.IntType():
            return click.IntRange(of.ge, of.le)
        case inspect.FloatType():
            return Real(of.ge if of.gt is None else of.gt, of.le, min_open=of.gt is not None)
        case inspect.VarTupleType(item_type=inspect.StrType()):
            return NameList()
        case inspect.VarTupleType():
            return click_type(of.item_type)
        case _:
            return click.STRING


def as_flag(value: object, option: click.Parameter | None = None) -> Any:
    """Return a value of JSON or TOML as its flag would take it, so that the flag's checks apply."""
    if getattr(option, "multiple", False):
        return [str(item) for item in (value if isinstance(value, list) else [value])]
    return json.dumps(value) if isinstance(value, dict) else str(value)
