"""All attacks on an engine with an honest model. A new one is a function with `@attack` in one of these modules."""

from tests.attacks import http_bodies, http_connections, http_messages, zeromq
from tests.attacks.registry import ATTACKS

__all__ = ["ATTACKS", "http_bodies", "http_connections", "http_messages", "zeromq"]
