"""The link's version is of its messages and of nothing else."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec

from ssd.config.params import Speculation
from ssd.ipc import messages as m
from ssd.ipc import public as p
from ssd.law import DrawParams, Law
from ssd.plugins.remote import link as n
from tests.ipc.test_messages import ALL, DIRECTIONS


def test_the_link_has_a_version_of_its_own() -> None:
    assert {message.version for message in ALL} == {p.PROTOCOL_VERSION, m.INTERNAL_VERSION, n.LINK_VERSION}
    assert len({p.PROTOCOL_VERSION, m.INTERNAL_VERSION, n.LINK_VERSION}) == 3


def _without_descriptions(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: _without_descriptions(value) for key, value in schema.items() if key != "description"}
    return [_without_descriptions(part) for part in schema] if isinstance(schema, list) else schema


def test_the_links_version_is_of_these_messages() -> None:
    """Machines that differ in their release must notice: who changes a message raises `LINK_VERSION`, and this.

    Schemas hold bounds and the names of a Literal, annotations the names of the fields of an array."""
    crossing = [type(message) for messages, end in DIRECTIONS for message in messages if end.version == n.LINK_VERSION]
    parts = [n.Entry, n.Trunk, m.Verified, m.Launch, Speculation, DrawParams, Law]
    _, schemas = msgspec.json.schema_components((*crossing, *parts))
    fields = {part.__name__: part.__annotations__ for part in (*crossing, *parts)}
    written = json.dumps([_without_descriptions(schemas), fields], sort_keys=True)
    found = hashlib.sha256(written.encode()).hexdigest()[:16]
    assert (n.LINK_VERSION, found) == (202, "6b0707197245e0c8")
