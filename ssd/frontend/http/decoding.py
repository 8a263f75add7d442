"""JSON to the structs of `bodies.py`, without unknown fields, and with an error for unsupported ones."""

from __future__ import annotations

import codecs
import functools
import logging
import re
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec
from msgspec import UNSET, inspect

from ssd.frontend.http.bodies import NEUTRAL, OTHER_VALUES
from ssd.frontend.http.errors import HttpError, cut, invalid, missing

log = logging.getLogger("ssd.http")

_Body = TypeVar("_Body", bound=msgspec.Struct)
_MOST_SAID = 256  # names of unknown fields that the log has
_MOST_BYTES = 64  # of a value that may be neutral
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class BodyDecoder(Generic[_Body]):
    """A decoder of the bodies of one route.

    An unknown field has no effect. Its name is logged once, if it stands in the body itself and not in a part of it.
    Numbers and booleans may be texts, and whole numbers may have a fraction of 0."""

    def __init__(self, kind: type[_Body]) -> None:
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind, strict=False)
        self._said: set[str] = set()

    def decode(self, raw: bytes) -> _Body:
        """Return the body. Raises HttpError 400, which names a wrong, missing or unsupported parameter."""
        raw = raw.removeprefix(codecs.BOM_UTF8)
        try:
            if not raw.isascii():
                raw.decode()  # the decoder does not look into fields that it leaves as they came
            body = self._decoder.decode(raw)
            _check_raw(body)
        except msgspec.ValidationError as error:
            raise _named(error) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise invalid(None, f"the body is no valid JSON: {error}", "invalid_json") from None
        if log.isEnabledFor(logging.INFO) and len(self._said) < _MOST_SAID:
            self._log_unknown(raw)
        return body

    def _log_unknown(self, raw: bytes) -> None:
        names = {cut(name) for name in _fields.decode(raw).keys() - {*self._kind.__struct_encode_fields__}}
        if new := sorted(names - self._said)[: _MOST_SAID - len(self._said)]:
            self._said.update(new)
            log.info("unknown fields of %s ignored: %s", self._kind.__name__, ", ".join(map(repr, new)))


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
