"""JSON to the structs of `bodies.py`, without unknown fields, and with an error for unsupported ones.

msgspec decides about unknown fields by struct and not by decoder, and names the field of an error in a text only."""

from __future__ import annotations

import codecs
import functools
import logging
import operator
import re
import types
from collections.abc import Sequence
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT, UNSET, inspect, structs

from ssd.frontend.http.bodies import NEUTRAL, OTHER_VALUES
from ssd.frontend.http.errors import HttpError, cut, invalid, missing

log = logging.getLogger("ssd.http")

_Body = TypeVar("_Body", bound=msgspec.Struct)
_MOST_SAID = 256  # names of unknown fields that the log has
_MOST_BYTES = 64  # of a value that may be neutral
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class BodyDecoder(Generic[_Body]):
    """A decoder of the bodies of one route.

    An unknown field is ignored, and logged once. Numbers and booleans may be texts, and whole numbers may have a
    fraction of 0."""

    def __init__(self, kind: type[_Body]) -> None:
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind)
        # Only bodies that do not fit are decoded a second time.
        self._lenient = msgspec.json.Decoder(lenient(kind), strict=False)
        self._said: set[str] = set()

    def decode(self, raw: bytes) -> _Body:
        """Return the body. Raises HttpError 400, which names a wrong, missing or unsupported parameter."""
        raw = raw.removeprefix(codecs.BOM_UTF8)
        try:
            if not raw.isascii():
                raw.decode()  # the decoder does not look into fields that it leaves as they came
            try:
                body = self._decoder.decode(raw)
            except msgspec.ValidationError as error:
                body = self._lenient.decode(raw)
                self._say(_unknown(error), raw)
            _check_raw(body)
        except msgspec.ValidationError as error:
            raise _named(error) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise invalid(None, f"the body is no valid JSON: {error}", "invalid_json") from None
        return body

    def _say(self, name: str | None, raw: bytes) -> None:
        if len(self._said) == _MOST_SAID:
            return
        names = {*_fields.decode(raw).keys() - {*self._kind.__struct_encode_fields__}}
        names |= set() if name is None else {re.sub(r"\[\d+\]", "[]", name)}
        new = sorted({cut(name) for name in names} - self._said)[: _MOST_SAID - len(self._said)]
        if new:
            self._said.update(new)
            log.warning("unknown fields of %s ignored: %s", self._kind.__name__, ", ".join(map(repr, new)))


def _unknown(error: msgspec.ValidationError) -> str | None:
    found = re.match(r"Object contains unknown field `([^`]*)`(?: - at `\$\.?([^`]*)`)?", str(error))
    return found and (f"{found[2]}.{found[1]}" if found[2] else found[1])


def _named(error: msgspec.ValidationError) -> HttpError:
    message = str(error)
    path = re.search(r" - at `\$\.?([^`]*)`$", message)
    param = path[1] if path and path[1] else None
    text = message[: path.start()] if path else message
    if lacks := re.search(r"missing required field `([^`]*)`", text):
        return missing(f"{param}.{lacks[1]}" if param else lacks[1])
    value = re.fullmatch(r"Invalid enum value '(.*)'", text, re.DOTALL)
    if value and value[1] in OTHER_VALUES:
        return _not_supported(str(param), value[1])
    if value:
        text = f"Invalid enum value '{cut(value[1])}'"
    return invalid(param, f"{param}: {text}" if param else text)


def _not_supported(param: str, value: str | None = None, but: Sequence[object] = ()) -> HttpError:
    accepted = f", but for {' and '.join(msgspec.json.encode(one).decode() for one in but)}" if but else ""
    message = f"{param} is not supported{accepted}" if value is None else f"{param}: {value} is not supported"
    return invalid(param, message, "unsupported_parameter")


# -- fields that are not there --------------------------------------------------------------------------------------


@functools.cache
def _neutral_values(kind: type[msgspec.Struct]) -> dict[str, tuple[object, ...]]:
    fields = inspect.type_info(kind).fields  # type: ignore[attr-defined]
    extras = {field.name: getattr(field.type, "extra", None) or {} for field in fields}
    return {name: extra[NEUTRAL] for name, extra in extras.items() if NEUTRAL in extra}


def _check_raw(body: msgspec.Struct) -> None:
    # Fields that decoding has left as they came.
    _refuse_unsupported(body)
    for name in ("structured_outputs", "response_format", "options"):
        if isinstance(part := getattr(body, name, None), msgspec.Struct):
            _refuse_unsupported(part, f"{name}.")
    for index, said in enumerate(getattr(body, "messages", None) or ()):
        _refuse_unsupported(said, f"messages[{index}].")


def _refuse_unsupported(part: msgspec.Struct, path: str = "") -> None:
    for name, neutral in _neutral_values(type(part)).items():
        if (given := getattr(part, name)) is UNSET:
            continue
        raw = bytes(given)
        if len(raw) > _MOST_BYTES or msgspec.json.decode(raw) not in (None, *neutral):
            raise _not_supported(f"{path}{name}", but=neutral)


# -- structs that skip unknown fields -------------------------------------------------------------------------------


@functools.cache
def lenient(kind: type[_Body]) -> type[_Body]:
    """Return a subclass of a struct that accepts and skips fields it does not know, in its parts too."""
    hints = get_type_hints(kind, include_extras=True)
    changed: list[Any] = []
    for field in structs.fields(kind):
        if (hint := _lenient_hint(hints[field.name])) is not hints[field.name]:
            changed.append((field.name, hint) if field.default is NODEFAULT else (field.name, hint, field.default))
    made: Any = msgspec.defstruct(kind.__name__, changed, bases=(kind,), kw_only=True, forbid_unknown_fields=False)
    return made


def _lenient_hint(hint: Any) -> Any:
    """Return a type with lenient structs in it, or the type itself where it has none."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return lenient(hint)
    inner = get_args(hint)
    if get_origin(hint) is Annotated:
        changed = _lenient_hint(inner[0])
        return hint if changed is inner[0] else Annotated[(changed, *inner[1:])]
    parts = tuple(map(_lenient_hint, inner))
    if all(map(operator.is_, parts, inner)):
        return hint
    if isinstance(hint, types.UnionType) or get_origin(hint) is Union:
        return functools.reduce(operator.or_, parts)
    return get_origin(hint)[parts]
