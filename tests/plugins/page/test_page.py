"""The chat page as it is served."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import ssd.plugins.page
from ssd.config.engine import ServerConfig
from tests.frontend.http_engine import http_engine

PAGE = Path(ssd.plugins.page.__file__).with_name("page.html")


def test_the_page_needs_no_key_and_may_run_its_own_script_only() -> None:
    with http_engine(ServerConfig(names=("scripted",), port=0, api_keys=("k",))) as engine:
        status, headers, content = engine.ask("GET", "/")
        assert engine.ask("GET", "/v1/models")[0] == engine.ask("GET", "/nonesuch")[0] == 401
        assert engine.ask("POST", "/", {})[0] == 401 and engine.ask("POST", "/", {}, {"x-api-key": "k"})[0] == 405
    assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
    assert "set-cookie" not in headers and headers["x-content-type-options"] == "nosniff"
    policy = dict(each.split(" ", 1) for each in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'" and policy["connect-src"] == "'self'"
    for tag in (b"script", b"style"):
        (inside,) = re.findall(rb"<%b>(.*)</%b>" % (tag, tag), content, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside).digest()).decode()
        assert policy[f"{tag.decode()}-src"] == f"'sha256-{digest}'"
    assert not re.findall(rb"https?:|//[a-z]+\.|document\.cookie", content)
    makes_html = rb"(inner|outer|insertAdjacent|set)HTML|document\.write|ContextualFragment|DOMParser|srcdoc"
    assert not re.findall(makes_html + rb"|\beval\(|new Function|javascript:", content)
    assert re.findall(rb"localStorage\.setItem\(.*", content) == [b"localStorage.setItem(CHAT + chat.id, text);"]


def test_a_page_of_a_name_that_leads_here_is_not_served() -> None:
    with http_engine() as engine:
        assert engine.ask("GET", "/", headers={"host": "evil.example"})[0] == 403


def test_without_ui_there_is_none() -> None:
    with http_engine(ServerConfig(names=("scripted",), port=0, ui=False)) as engine:
        status, headers, content = engine.ask("GET", "/")
    assert (status, headers["content-type"]) != (200, "text/html; charset=utf-8") and b"<" not in content


class _Inputs(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, str] = {}

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag == "input" and given.get("type") == "number" and given.get("value"):
            self.values[str(given["name"])] = str(given["value"])


def settings(page: str) -> dict[str, Any]:
    """Return the numbers that the page sends when nobody has changed one: those of its fields that have a value."""
    assert (
        'for (const { name, type, value } of field) if (type === "number" && value) body[name] = Number(value);' in page
    )
    inputs = _Inputs()
    inputs.feed(page)
    return {name: json.loads(value) for name, value in inputs.values.items()}


def test_who_never_opens_the_settings_gets_the_models_own_sampling() -> None:
    assert settings(PAGE.read_text()) == {"max_tokens": 1024}
