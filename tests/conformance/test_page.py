"""The chat page in headless Chromium. Skipped where there is none."""

from __future__ import annotations

import json
import re
import shutil
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

from tests.conformance.conftest import launched
from tests.conformance.repeating import repeating

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
_FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
_PATIENCE_S = 30.0
_ROUND_MS = "50"
FAINT = """() => {
  const paint = document.createElement("canvas").getContext("2d");
  const luminance = (color) => {
    paint.fillStyle = color;
    paint.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...paint.getImageData(0, 0, 1, 1).data].map((each) => ((each / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const backgroundOf = (each) => {
    const color = getComputedStyle(each).backgroundColor;
    return color === "rgba(0, 0, 0, 0)" && each.parentElement ? backgroundOf(each.parentElement) : color;
  };
  const texts = document.querySelectorAll("h1, h2, button, .text, .text span, .figures, .origins b, #served");
  return [...texts].some((each) => {
    const [a, b] = [getComputedStyle(each).color, backgroundOf(each)].map(luminance);
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5;
  });
}"""  # WCAG's contrast of normal text
HOSTILE = [
    "<img src=x onerror=\"document.title='owned'\">",
    "<script>document.title='owned'</script>",
    "</span></p><h1>owned</h1>",
    "&lt;b&gt;",
    "<iframe srcdoc=\"<script>parent.document.title='owned'</script>\">",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page of its own, which must ask no other machine and have no error."""
    context = browser.new_context()
    context.set_default_timeout(_PATIENCE_S * 1e3)
    page, asked, errors = context.new_page(), list[str](), list[str]()
    context.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    assert asked and not [url for url in asked if not re.match(r"http://127\.0\.0\.1:\d+/|data:", url)]
    assert not errors
    assert not context.cookies()
    context.close()


@pytest.fixture(scope="module")
def slow() -> Iterator[str]:
    """The mock, slow enough for an answer to be stopped."""
    with launched("--load-format", "mock", SSD_MOCK_ROUND_MS=_ROUND_MS) as url:
        yield url


def say(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def wait_for_the_end(page: Page) -> None:
    expect(page.locator("article[aria-busy=false]").last).to_be_visible(timeout=_PATIENCE_S * 1e3)
    expect(page.locator("[aria-busy=true]")).to_have_count(0, timeout=_PATIENCE_S * 1e3)


def the_ask(page: Page, text: str) -> dict[str, object]:
    """The body of the request that the page makes when the user says `text`."""
    with page.expect_request("**/v1/chat/completions") as caught:
        say(page, text)
    asked: Request = caught.value
    return dict(json.loads(asked.post_data or ""))


def test_a_conversation_with_the_pair_and_its_figures(page: Page) -> None:
    with launched("--mode", "ssd") as url:
        page.goto(url)
        expect(page.locator("#served")).to_contain_text("smollm2 + smollm2-draft · mode ssd")
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Max tokens").fill("48")
        page.get_by_role("button", name="Done").click()
        say(page, "Write a Python function that reverses a string.")
        wait_for_the_end(page)
        shown = page.locator(".answer .text").inner_text()
        again = the_ask(page, "Shorter, please.")
        wait_for_the_end(page)
    assert "def reverse_string" in shown
    roles = [(said["role"], said["content"]) for said in again["messages"]]  # type: ignore[index, attr-defined]
    assert [role for role, _ in roles] == ["user", "assistant", "user"] and roles[1][1].strip() == shown.strip()
    for index in range(2):
        figures = page.locator(".figures").nth(index).inner_text()
        assert re.search(r"^\d+ tokens · \d+ tok/s · \d\.\d\d tokens a round · .*mode ssd", figures)
        tokens = int(figures.split()[0])
        counts = re.findall(r"(hit|miss|draft|rejected|plain) (\d+)", page.locator(".origins").nth(index).inner_text())
        assert sum(int(count) for _, count in counts) == tokens
        for origin, _ in counts:  # the legend has all that is in the text, in the same colour
            swatch = page.locator(".origins").nth(index).locator(f".{origin}")
            text = page.locator(".answer .text").nth(index).locator(f".{origin}").first
            assert origin == "plain" or colour(swatch) == colour(text) != "rgba(0, 0, 0, 0)"


def colour(found: object) -> str:
    return str(found.evaluate("element => getComputedStyle(element).backgroundColor"))  # type: ignore[attr-defined]


def test_an_answer_comes_as_it_is_made_and_can_be_stopped(page: Page, slow: str) -> None:
    page.goto(slow)
    for stop in (lambda: page.get_by_role("button", name="Stop").click(), lambda: page.keyboard.press("Escape")):
        say(page, "Tell me everything.")
        expect(page.locator(".answer .text span").nth(1)).to_be_attached()
        assert info(slow)["requests"]["open"] == 1
        stop()
        wait_for_the_end(page)
        expect(page.locator(".figures").last).to_contain_text(re.compile(r"^stopped · \d+ tokens?$"))
        deadline = time.monotonic() + _PATIENCE_S
        while info(slow)["requests"] != {"open": 0, "running": 0, "waiting": 0}:
            assert time.monotonic() < deadline, "the engine still works on it"
        expect(page.get_by_label("Message")).to_be_focused()
        page.get_by_role("button", name="New chat").click()
        expect(page.locator("article")).to_have_count(0)


def info(url: str) -> dict[str, dict[str, int]]:
    with urllib.request.urlopen(f"{url}/server_info") as answer:
        return dict(json.load(answer))


def test_settings_are_sent(page: Page, mock_server: str) -> None:
    page.goto(mock_server)
    expect(page.get_by_label("Thinking")).to_be_hidden()  # the built-in template knows nothing of it
    plain = the_ask(page, "a")
    assert plain["max_tokens"] == 1024 and not {"temperature", "top_p", "seed"} & plain.keys()
    wait_for_the_end(page)
    page.get_by_role("button", name="Settings").click()
    given = {"Temperature": "0.5", "Top p": "0.9", "Max tokens": "7", "Seed": "11", "System prompt": "Be brief."}
    for label, value in given.items():
        page.get_by_label(label).fill(value)
    page.get_by_label("Colour answers").uncheck()
    page.keyboard.press("Escape")
    page.reload()  # settings stay with the tab, what was said does not
    body = the_ask(page, "b")
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "b"}]
    assert {name: body[name] for name in ("temperature", "top_p", "max_tokens", "seed")} == {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 7,
        "seed": 11,
    }
    assert "return_origins" not in body
    wait_for_the_end(page)
    expect(page.locator(".figures")).to_contain_text("7 tokens")
    expect(page.locator(".figures")).to_contain_text("cut at max tokens")
    expect(page.locator(".origins")).to_have_count(0)


def test_hostile_text_stays_text(page: Page, tmp_path: Path) -> None:
    """A model that says HTML, thinks HTML and has a name in HTML, and a user who types it."""
    thoughts = ["<think>", *(f"{each} " for each in HOSTILE), "</think>"]
    model = str(repeating(tmp_path / "hostile", {"<assistant>": [*thoughts, *HOSTILE]}))
    options = ("--target", model, "--draft", model, "--mode", "sd", "--reasoning-parser", "think")
    with launched(*options, "--served-model-name", HOSTILE[0]) as url:
        page.goto(url)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Thinking").select_option("on")
        page.keyboard.press("Escape")
        assert the_ask(page, HOSTILE[1])["chat_template_kwargs"] == {"enable_thinking": True}
        wait_for_the_end(page)
        assert page.locator(".user .text").inner_text() == HOSTILE[1]
        assert page.locator(".answer > .text").inner_text() == "".join(HOSTILE)
        page.get_by_text("Thoughts").click()
        page.get_by_text("Thoughts").click()
        assert page.locator(".thoughts .text").inner_text().strip() == " ".join(HOSTILE)
    assert page.locator("img, iframe, h1:not(header h1), #log script").count() == 0
    assert page.title() != "owned"


def test_a_key_is_asked_for_and_sent(page: Page) -> None:
    with launched("--load-format", "mock", SSD_API_KEY="open-sesame") as url:
        page.goto(url)
        expect(page.get_by_role("alert")).to_have_text("This server wants an API key.")
        expect(page.get_by_label("API key")).to_be_focused()
        page.keyboard.press("Escape")
        say(page, "Hello.")
        expect(page.get_by_role("alert")).to_be_visible()
        expect(page.get_by_label("Message")).to_have_value("Hello.")
        expect(page.locator("article")).to_have_count(0)
        page.keyboard.type("open-sesame")
        page.keyboard.press("Enter")
        expect(page.locator("#served")).to_contain_text("smollm2")
        page.keyboard.press("Enter")  # the question is still there
        wait_for_the_end(page)
        expect(page.locator(".figures")).to_contain_text("tokens a round")
        expect(page.get_by_role("alert")).to_be_hidden()
    say(page, "Are you there?")  # it has ended
    expect(page.get_by_role("alert")).to_have_text("The server cannot be reached.")
    expect(page.get_by_label("Message")).to_have_value("Are you there?")


def test_an_answer_that_breaks_off_is_an_error_and_no_question_is_lost(page: Page, slow: str) -> None:
    event = {"choices": [{"index": 0, "delta": {"content": "half of"}, "finish_reason": None}]}
    page.goto(slow)
    expect(page.locator("#served")).to_contain_text("smollm2")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=f"data: {json.dumps(event)}\n\n"))
    say(page, "Why?")
    expect(page.get_by_role("alert")).to_have_text("The connection was lost before the answer was complete.")
    expect(page.locator(".answer .text")).to_have_text("half of")
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
    say(page, "And why?")
    expect(page.get_by_role("alert")).to_have_text("The server cannot be reached.")
    expect(page.get_by_label("Message")).to_have_value("And why?")
    page.unroute("**/v1/chat/completions")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.locator(".answer .text span").nth(3)).to_be_attached()
    page.keyboard.press("Escape")


def test_an_error_of_the_api_is_shown_in_its_words(page: Page, mock_server: str) -> None:
    page.goto(mock_server)
    say(page, "a " * 10_000)
    expect(page.get_by_role("alert")).to_contain_text("tokens")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("3")
    page.get_by_role("button", name="Done").click()
    expect(page.get_by_label("Temperature")).to_be_focused()  # the browser says what is wrong with it


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_all_can_read_it(page: Page, mock_server: str, scheme: Literal["light", "dark"]) -> None:
    page.set_viewport_size({"width": 340, "height": 640})
    page.emulate_media(color_scheme=scheme)
    page.goto(mock_server)
    say(page, "word" * 100)
    wait_for_the_end(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 340
    unnamed = "[...document.querySelectorAll('input, textarea, select')].filter(each => !each.labels?.length).length"
    assert page.evaluate(unnamed) == 0
    expect(page.get_by_role("log")).to_have_attribute("aria-live", "polite")
    expect(page.get_by_role("status")).to_contain_text("Answer complete")
    assert not page.evaluate(FAINT), "text that is hard to read on its background"
    page.get_by_label("Message").press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_label("API key")).to_be_visible()
