"""The chat page in headless Chromium. Skipped where there is none."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

from tests.conformance.conftest import launched
from tests.conformance.repeating import repeating

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.mock, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")]
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
  const texts = document.querySelectorAll("h1, h2, button, .text, .text *, .figures, #origins b, .note, #served");
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


def converse(page: Page, text: str) -> None:
    """Say a text, and wait for the end of its answer."""
    say(page, text)
    wait_for_the_end(page)


def settle(page: Page, given: dict[str, str]) -> None:
    press(page, "Settings")
    for label, value in given.items():
        page.get_by_label(label).fill(value)
    press(page, "Done")


def the_ask(page: Page, act: str | Callable[[], object]) -> dict[str, Any]:
    """The body of the request that the page makes when the user says a text, or does what makes one."""
    with page.expect_request("**/v1/chat/completions") as caught:
        say(page, act) if isinstance(act, str) else act()
    asked: Request = caught.value
    return dict(json.loads(asked.post_data or ""))


def press(page: Page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).last.click()


def contents(body: dict[str, Any]) -> list[str]:
    return [message["content"] for message in body["messages"]]


def test_a_conversation_with_the_pair_and_its_figures(page: Page) -> None:
    with launched("--mode", "ssd") as url:
        page.goto(url)
        expect(page.locator("#served")).to_contain_text("smollm2 + smollm2-draft · mode ssd")
        press(page, "Settings")
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Max tokens").fill("48")
        page.get_by_label("Colour answers").check()
        press(page, "Done")
        converse(page, "Write a Python function that reverses a string.")
        shown = page.locator(".answer > .text").inner_text()
        again = the_ask(page, "Shorter, please.")
        wait_for_the_end(page)
    assert "def reverse_string" in shown
    roles = [(said["role"], said["content"]) for said in again["messages"]]
    assert [role for role, _ in roles] == ["user", "assistant", "user"] and roles[1][1].strip() == shown.strip()
    counted = page.locator(".origins:not(.sources)")
    for index in range(2):
        figures = page.locator(".figures").nth(index).inner_text()
        assert re.search(r"^\d+ tokens · \d+ tok/s · \d+\.\d\d tokens a round · .*mode ssd", figures)
        tokens = int(figures.split()[0])
        counts = re.findall(r"(hit|miss|draft|rejected|plain) (\d+)", counted.nth(index).inner_text())
        assert sum(int(count) for _, count in counts) == tokens
        for origin, _ in counts:  # the legend has all that is in the text, in the same colour
            swatches = [counted.nth(index).locator(f".{origin}"), page.locator(f"#legend .{origin}")]
            text = page.locator(".answer > .text").nth(index).locator(f".{origin}").first
            assert origin == "plain" or {colour(each) for each in swatches} == {colour(text)} != {"rgba(0, 0, 0, 0)"}
    for source in re.findall(r"from (\w+) \d", page.locator(".sources").first.inner_text()):
        expect(page.locator("#legend")).to_contain_text(f"{source}: ")
    press(page, "Settings")
    page.get_by_label("Colour answers").uncheck()  # what is here becomes Markdown
    expect(page.locator("#legend")).to_be_hidden()
    expect(page.locator(".answer > .text > .code code").first).to_contain_text("def reverse_string")


def colour(found: object) -> str:
    return str(found.evaluate("element => getComputedStyle(element).backgroundColor"))  # type: ignore[attr-defined]


def test_an_answer_comes_as_it_is_made_and_can_be_stopped(page: Page, slow: str) -> None:
    page.goto(slow)
    for stop in (lambda: press(page, "Stop"), lambda: page.keyboard.press("Escape")):
        say(page, "Tell me everything.")
        expect(page.locator(".answer > .text p")).to_be_attached()
        assert info(slow)["requests"]["open"] == 1
        stop()
        wait_for_the_end(page)
        expect(page.locator(".figures").last).to_contain_text(re.compile(r"^stopped · \d+ tokens?$"))
        deadline = time.monotonic() + _PATIENCE_S
        while info(slow)["requests"] != {"open": 0, "running": 0, "waiting": 0}:
            assert time.monotonic() < deadline, "the engine still works on it"
        expect(page.get_by_label("Message")).to_be_focused()
        press(page, "New chat")
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
    press(page, "Settings")
    given = {"Temperature": "0.5", "Top p": "0.9", "Max tokens": "7", "Seed": "11", "System prompt": "Be brief."}
    for label, value in given.items():
        page.get_by_label(label).fill(value)
    page.keyboard.press("Escape")
    page.reload()  # settings stay with the tab
    press(page, "New chat")
    body = the_ask(page, "b")
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "b"}]
    assert {name: body[name] for name in ("temperature", "top_p", "max_tokens", "seed")} == {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 7,
        "seed": 11,
    }
    wait_for_the_end(page)
    expect(page.locator(".figures")).to_contain_text("7 tokens")
    expect(page.locator(".figures")).to_contain_text("cut at max tokens")
    expect(page.locator("#legend")).to_be_hidden()  # until it is asked for
    expect(page.locator(".origins:visible")).to_have_count(0)


def test_hostile_text_stays_text(page: Page, tmp_path: Path) -> None:
    thoughts = ["<think>", *(f"{each} " for each in HOSTILE), "</think>"]
    model = str(repeating(tmp_path / "hostile", {"<assistant>": [*thoughts, *HOSTILE]}))
    options = ("--target", model, "--draft", model, "--mode", "sd", "--reasoning-parser", "think")
    with launched(*options, "--served-model-name", HOSTILE[0]) as url:
        page.goto(url)
        press(page, "Settings")
        page.get_by_label("Thinking").select_option("on")
        page.keyboard.press("Escape")
        asked = the_ask(page, HOSTILE[1])
        assert asked["chat_template_kwargs"] == {"enable_thinking": True}
        wait_for_the_end(page)
        assert asked["temperature"] == 0.6  # this model's card names none, and the server's own is 1
        expect(page.get_by_label("Temperature")).to_have_attribute("placeholder", "0.6")
        expect(page.locator("#card")).to_contain_text("The page then asks for temperature 0.6.")
        assert page.locator(".user .text").inner_text() == HOSTILE[1]
        assert page.locator(".answer > .text").inner_text() == "".join(HOSTILE)
        expect(page.locator(".thoughts .text")).to_be_hidden()
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
        expect(page.locator("article")).to_have_text(re.compile("Hello."))  # what was typed stays
        page.keyboard.type("open-sesame")
        page.keyboard.press("Enter")
        expect(page.locator("#served")).to_contain_text("smollm2")
        expect(page.get_by_role("button", name="Try again")).to_be_focused()
        assert contents(the_ask(page, lambda: page.keyboard.press("Enter"))) == ["Hello."]
        wait_for_the_end(page)
        stored = page.evaluate("[JSON.stringify(localStorage), JSON.stringify(sessionStorage)]")
        assert "Hello." in stored[0] and "open-sesame" not in stored[0] and "open-sesame" in stored[1]
        expect(page.locator(".figures")).to_contain_text("tokens a round")
        expect(page.get_by_role("alert")).to_be_hidden()
    say(page, "Are you there?")  # it has ended
    expect(page.get_by_role("alert")).to_have_text("The server cannot be reached.")
    expect(page.locator(".user .text").last).to_have_text("Are you there?")


def test_an_answer_that_breaks_off_is_an_error_and_no_question_is_lost(page: Page, slow: str) -> None:
    event = {"choices": [{"index": 0, "delta": {"content": "half of"}, "finish_reason": None}]}
    page.goto(slow)
    expect(page.locator("#served")).to_contain_text("smollm2")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=f"data: {json.dumps(event)}\n\n"))
    say(page, "Why?")
    expect(page.get_by_role("alert")).to_have_text("The connection was lost before the answer was complete.")
    expect(page.locator(".answer > .text")).to_have_text("half of")
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
    say(page, "And why?")
    expect(page.get_by_role("alert")).to_have_text("The server cannot be reached.")
    page.reload()  # the question is kept
    expect(page.get_by_role("alert")).to_have_text("This has no answer yet.")
    page.unroute("**/v1/chat/completions")
    assert contents(the_ask(page, lambda: press(page, "Try again"))) == ["Why?", "half of", "And why?"]
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.locator(".answer > .text").nth(1)).not_to_be_empty()
    page.keyboard.press("Escape")
    wait_for_the_end(page)
    page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
    old = page.locator(".answer > .text").nth(1).inner_text()
    press(page, "Regenerate")
    expect(page.get_by_role("alert")).to_have_text("The server cannot be reached.")
    assert page.locator(".answer > .text").nth(1).inner_text() == old  # until there is another one


def test_a_question_that_failed_and_one_after_it_are_one(page: Page, mock_server: str) -> None:
    page.goto(mock_server)
    page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
    say(page, "a")
    expect(page.get_by_role("alert")).to_be_visible()
    assert contents(the_ask(page, "b")) == ["a\n\nb"]


def test_an_error_of_the_api_is_shown_in_its_words(page: Page, mock_server: str) -> None:
    page.goto(mock_server)
    say(page, "a " * 10_000)
    expect(page.get_by_role("alert")).to_contain_text("tokens")
    settle(page, {"Temperature": "3"})
    expect(page.get_by_label("Temperature")).to_be_focused()  # the browser says what is wrong with it


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_all_can_read_it(page: Page, mock_server: str, scheme: Literal["light", "dark"]) -> None:
    page.set_viewport_size({"width": 340, "height": 640})
    page.emulate_media(color_scheme=scheme)
    page.goto(mock_server)
    press(page, "Settings")
    page.get_by_label("Colour answers").check()
    page.keyboard.press("Escape")
    converse(page, "word" * 100)
    assert page.evaluate("document.documentElement.scrollWidth") == 340
    unnamed = "[...document.querySelectorAll('input, textarea, select')].filter(each => !each.labels?.length).length"
    assert page.evaluate(unnamed) == 0
    expect(page.get_by_role("log")).to_have_attribute("aria-live", "polite")
    expect(page.get_by_role("status")).to_contain_text("Answer complete")
    assert not page.evaluate(FAINT), "text that is hard to read on its background"
    page.get_by_role("button", name="Settings").press("Enter")
    expect(page.get_by_label("API key")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_label("Conversations")).to_be_hidden()
    page.get_by_role("button", name="Chats").press("Enter")
    expect(page.get_by_label("Conversations")).to_be_visible()
    press(page, "New chat")
    expect(page.get_by_label("Conversations")).to_be_hidden()
    expect(page.get_by_label("Message")).to_be_focused()


# -- conversations --------------------------------------------------------------------------------------------------


def test_conversations_are_kept_until_they_are_deleted(page: Page, mock_server: str) -> None:
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(mock_server)
    for text in ("first\nof all", "second"):
        press(page, "New chat")
        converse(page, text)
    answer = page.locator(".answer").inner_text()
    page.get_by_label("Message").fill("not sent")
    page.reload()
    expect(page.get_by_label("Message")).to_have_value("not sent")
    assert page.locator(".answer").inner_text() == answer
    names = page.locator("#chats li > :first-child")
    expect(names).to_have_text(["second", "first"])
    names.nth(1).click()
    expect(page.locator(".user .text")).to_have_text("first\nof all")
    assert contents(the_ask(page, "more"))[::2] == ["first\nof all", "more"]
    wait_for_the_end(page)
    expect(names).to_have_text(["first", "second"])
    page.get_by_role("button", name="Delete: first").click()
    expect(names).to_have_text(["second"])
    expect(page.locator("article")).to_have_count(0)
    page.reload()
    expect(names).to_have_text(["second"])
    press(page, "Delete all")
    assert page.evaluate("localStorage.length") == 0


def test_an_answer_under_way_is_kept_by_a_reload(page: Page, slow: str) -> None:
    page.goto(slow)
    say(page, "Tell me everything.")
    expect(page.locator(".answer > .text p")).to_be_attached()
    page.reload()
    expect(page.locator(".answer > .text")).not_to_be_empty()
    expect(page.locator("[aria-busy=true]")).to_have_count(0)


def test_what_others_wrote_in_the_store_does_no_harm_and_the_oldest_go(page: Page, mock_server: str) -> None:
    page.goto(mock_server)
    converse(page, "good")
    page.evaluate("""() => {
      const bad = ["", "{", "null", "[]", '{"messages":[]}', '{"messages":[{"role":"user"}]}', '{"messages":[null]}',
                   '{"messages":[{"role":"user","content":"a"},{"role":"assistant","parts":[[1]],"figures":[]}]}'];
      bad.forEach((text, index) => localStorage.setItem(CHAT + index, text));
      const old = (content) => JSON.stringify({ changed: 1, messages: [{ role: "user", content }] });
      for (let index = 0; index < 3; index++) localStorage.setItem(CHAT + "old" + index, old("x".repeat(900_000)));
    }""")
    page.reload()
    names = page.locator("#chats li > :first-child")
    expect(names).to_have_count(4)
    converse(page, "more")
    expect(names).to_have_count(3)
    expect(names.first).to_have_text("good")
    assert page.evaluate("Object.keys(localStorage).filter(key => key.includes('old')).length") == 2


def test_two_tabs_share_their_conversations(page: Page, mock_server: str) -> None:
    page.goto(mock_server)
    converse(page, "first")
    with page.expect_popup() as opened:
        page.evaluate(
            "window.open(location.href, '_blank')"
        )  # with a copy of this tab's session: the same conversation
    other = opened.value
    expect(other.locator(".user .text")).to_have_text(["first"])
    converse(page, "second")
    expect(other.locator(".user .text")).to_have_text(["first", "second"])
    press(other, "New chat")
    converse(other, "third")
    names = page.locator("#chats li > :first-child")
    expect(names).to_have_text(["third", "first"])
    expect(page.locator(".user .text")).to_have_text(["first", "second"])


def test_a_running_answer_is_coloured_at_once(page: Page, slow: str) -> None:
    page.goto(slow)
    say(page, "Tell me everything.")
    expect(page.locator(".answer > .text p")).to_be_attached()
    press(page, "Settings")
    page.get_by_label("Colour answers").check()
    expect(page.locator(".answer > .text > span").nth(2)).to_be_attached()
    expect(page.locator(".answer > .text p")).to_have_count(0)
    press(page, "Done")
    moving = []
    motions: list[Literal["no-preference", "reduce"]] = ["no-preference", "reduce"]
    for motion in motions:
        page.emulate_media(reduced_motion=motion)
        moving.append(page.evaluate("document.getAnimations().length"))
    assert moving == [1, 0]
    press(page, "Stop")
    wait_for_the_end(page)
    told = page.evaluate("chat.messages.at(-1).parts.map(([text]) => text).join('')")
    assert page.evaluate("document.querySelector('.answer > .text').textContent") == told


def test_a_question_is_edited_and_an_answer_made_again(page: Page, mock_server: str) -> None:
    page.goto(mock_server)
    for text in ("one", "two"):
        converse(page, text)
    again = the_ask(page, lambda: press(page, "Regenerate"))
    wait_for_the_end(page)
    assert [message["role"] for message in again["messages"]] == ["user", "assistant", "user"]
    expect(page.locator("article")).to_have_count(4)
    page.get_by_role("button", name="Edit").first.click()
    page.keyboard.press("Escape")
    expect(page.locator("article")).to_have_count(4)
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edited text").fill("three")
    assert contents(the_ask(page, lambda: page.keyboard.press("Enter"))) == ["three"]
    wait_for_the_end(page)
    expect(page.locator(".user .text")).to_have_text(["three"])
    page.reload()
    expect(page.locator(".user .text")).to_have_text(["three"])


def test_answers_and_code_are_copied(page: Page, mock_server: str) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(mock_server)
    text = "**Look:**\n\n```python\ndef f():\n\treturn 1\n```"
    event = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}
    stream = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=stream))
    converse(page, "Why?")
    page.locator(".answer .acts").get_by_role("button", name="Copy").click()
    expect(page.get_by_role("status")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == text
    expect(page.locator(".code span")).to_have_text("python")
    page.locator(".code button").click()
    expect(page.locator(".code button")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "def f():\n\treturn 1"


# -- states ---------------------------------------------------------------------------------------------------------

KEPT = "Object.keys(localStorage).filter(key => key.startsWith(CHAT)).length"


def refuse(page: Page) -> None:
    page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))


def test_a_conversation_beyond_the_bound_is_not_kept_and_moves_no_other(page: Page, mock_server: str) -> None:
    page.goto(mock_server)
    refuse(page)
    say(page, "first")
    press(page, "New chat")
    page.evaluate("prompt.value = 'x'.repeat(2_000_001); ask.requestSubmit()")
    expect(page.locator("#unkept")).to_contain_text("too long to be kept")
    expect(page.locator("#unkept")).to_be_in_viewport()
    assert page.evaluate(KEPT) == 1
    names = page.locator("#chats li > :first-child")
    names.last.click()
    expect(page.locator(".user .text")).to_have_text("first")
    expect(page.locator("#unkept")).to_be_hidden()
    say(page, "more")
    expect(names).to_have_count(2)
    names.last.click()
    press(page, "Edit")
    page.get_by_label("Edited text").fill("short")
    page.keyboard.press("Enter")
    expect(page.locator("#unkept")).to_be_hidden()
    page.reload()
    expect(names).to_have_text(["short", "first"])


def test_a_full_store_is_said_until_it_has_room(page: Page, mock_server: str) -> None:
    page.goto(mock_server)
    refuse(page)
    say(page, "first")
    page.evaluate("""() => {
      for (let size = 5_000_000, index = 0; size >= 1; index++) {
        try { localStorage.setItem("other" + index, "x".repeat(size)); } catch { size = Math.floor(size / 2); }
      }
    }""")
    say(page, "second, with some words")
    expect(page.locator("#unkept")).to_contain_text("store is full")
    page.evaluate("Object.keys(localStorage).forEach(key => key.startsWith('other') && localStorage.removeItem(key))")
    say(page, "third")
    expect(page.locator("#unkept")).to_be_hidden()
    page.reload()
    expect(page.locator(".user .text")).to_have_text(["first", "second, with some words", "third"])


def test_an_edit_is_cancelled_while_an_answer_runs(page: Page, slow: str) -> None:
    page.goto(slow)
    refuse(page)
    for text in ("one", "two"):
        say(page, text)
    page.unroute("**/v1/chat/completions")
    for index in range(2):
        page.get_by_role("button", name="Edit").first.click()
        page.get_by_label("Edited text").last.fill(f"changed {index}")
    say(page, "Tell me everything.")
    expect(page.locator(".answer > .text p")).to_be_attached()
    page.get_by_label("Edited text").first.press("Escape")
    expect(page.get_by_label("Edited text")).to_have_value("changed 1")
    press(page, "Cancel")
    expect(page.locator(".user .text")).to_have_text(["one", "two", "Tell me everything."])
    begun = page.locator(".answer > .text").inner_text()
    expect(page.locator(".answer > .text")).not_to_have_text(begun)  # it still runs and is shown
    press(page, "Stop")
    wait_for_the_end(page)
    told = page.evaluate("chat.messages.at(-1).parts.map(([text]) => text).join('')")
    assert page.evaluate("document.querySelector('.answer > .text').textContent") == told.strip()


def test_an_open_edit_outlives_an_answer_that_failed_or_is_made_again(page: Page, mock_server: str) -> None:
    page.goto(mock_server)
    for text in ("one", "two"):
        converse(page, text)
    page.get_by_role("button", name="Edit").last.click()
    gone = page.get_by_text("What follows it will be gone.")
    expect(gone).to_be_hidden()
    page.get_by_label("Edited text").fill("2")
    the_ask(page, lambda: press(page, "Regenerate"))
    wait_for_the_end(page)
    refuse(page)
    press(page, "Regenerate")
    expect(page.get_by_role("alert")).to_be_visible()
    say(page, "three")
    expect(page.get_by_role("alert")).to_be_visible()
    expect(gone).to_be_visible()
    expect(page.get_by_label("Edited text")).to_have_value("2")
    page.unroute("**/v1/chat/completions")
    assert contents(the_ask(page, lambda: page.get_by_label("Edited text").press("Enter")))[::2] == ["one", "2"]
    wait_for_the_end(page)
    expect(page.locator("article")).to_have_count(4)


def test_what_is_deleted_in_another_tab_is_not_written_back(page: Page, slow: str) -> None:
    page.goto(slow)
    say(page, "first")
    expect(page.locator(".answer > .text p")).to_be_attached()
    with page.expect_popup() as opened:
        page.evaluate("window.open(location.href, '_blank')")
    other = opened.value
    expect(other.locator(".user .text")).to_have_text("first")
    other.on("dialog", lambda dialog: dialog.accept())
    press(other, "Delete all")
    expect(page.locator("#unkept")).to_contain_text("deleted in another tab")
    press(page, "Stop")
    wait_for_the_end(page)
    assert page.evaluate(KEPT) == 0
    page.reload()
    expect(page.locator("article")).to_have_count(0)
    assert page.evaluate(KEPT) == 0


def test_the_page_works_where_the_browser_keeps_nothing(page: Page, mock_server: str) -> None:
    forbid = "{ get() { throw new DOMException('no', 'SecurityError'); } }"
    for store in ("sessionStorage", "localStorage"):
        page.add_init_script(f"Object.defineProperty(window, '{store}', {forbid})")
    page.goto(mock_server)
    assert the_ask(page, "first")["max_tokens"] == 1024
    wait_for_the_end(page)
    expect(page.locator("#unkept")).to_contain_text("switched off")
    press(page, "New chat")
    settle(page, {"Max tokens": "7"})
    assert the_ask(page, "second")["max_tokens"] == 7
    wait_for_the_end(page)
    expect(page.locator("#chats li > :first-child")).to_have_text(["second", "first"])


def test_settings_that_cannot_be_read_are_the_defaults(page: Page, mock_server: str) -> None:
    page.goto(mock_server)
    for stored in ("{", "null", "5", '"text"', '{"length": 1, "item": 2, "max_tokens": "many"}'):
        page.get_by_label("Message").fill("typed")
        page.evaluate("stored => sessionStorage.setItem(SETTINGS, stored)", stored)
        page.reload()
        expect(page.get_by_label("Message")).to_have_value("typed")
        expect(page.locator("#served")).to_contain_text("smollm2")


def test_a_key_that_cannot_be_sent_is_named(page: Page, mock_server: str) -> None:
    page.goto(mock_server)
    converse(page, "a")
    press(page, "Settings")
    page.get_by_label("API key").fill("ключ")
    page.keyboard.press("Escape")
    press(page, "Regenerate")
    expect(page.locator(".failed .error")).to_contain_text("This API key has")
    expect(page.get_by_label("API key")).to_be_focused()
    expect(page.locator(".answer > .text")).not_to_be_empty()


def test_copy_is_copy_again(page: Page, mock_server: str) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(mock_server)
    converse(page, "a")
    pressed = page.locator(".answer .acts button").first
    for _ in range(2):
        pressed.click()
        expect(pressed).to_have_text("Copied")
    expect(pressed).to_have_text("Copy")


# -- Markdown -------------------------------------------------------------------------------------------------------

SHOWN = """([text, cuts]) => {
  const root = document.createElement("div");
  const view = new Markdown(root);
  for (const [index, cut] of cuts.entries()) {
    view.write(text.slice(cuts[index - 1] ?? 0, cut));
    view.paint();
  }
  root.normalize();
  return root.innerHTML.replaceAll(' target="_blank" rel="noopener noreferrer nofollow"', "");
}"""


def shown(page: Page, text: str, cuts: list[int] | None = None) -> str:
    """The HTML of a text that comes in parts, which end at `cuts`."""
    return str(page.evaluate(SHOWN, [text, [*(cuts or []), len(text)]]))


MARKDOWN = json.loads((Path(__file__).parent / "markdown.json").read_text())
BLOCKS, INLINE = ([(text, html) for text, html in MARKDOWN[name]] for name in ("blocks", "inline"))


def test_markdown_becomes_elements(page: Page, mock_server: str) -> None:
    page.goto(mock_server)
    cases = BLOCKS + [(text, f"<p>{html}</p>") for text, html in INLINE]
    assert [(text, shown(page, text)) for text, _ in cases] == cases


def test_only_addresses_of_the_web_become_links(page: Page, mock_server: str) -> None:
    page.goto(mock_server)
    for text in MARKDOWN["no links"]:
        assert "<a" not in shown(page, text), text
    made = page.evaluate("""() => {
      const root = document.createElement("div");
      addBlock(root, { kind: "paragraph", text: "[a](https://x.example/)" });
      const { href, target, rel } = root.querySelector("a");
      return { href, target, rel };
    }""")
    assert made == {"href": "https://x.example/", "target": "_blank", "rel": "noopener noreferrer nofollow"}


PIECES = [
    *("- a", "* b", "1. c", "  - d", "    e", "\t- f", "2) g", "-", "---", "***", "# h", "##", "> q", "> - r", ">"),
    *("```", "```py", "~~~", "   ```", "| a | b |", "|---|---|", "a | b", "--|--", "text", "  text", "**bold", "end**"),
    *("`code", "` x", "[l](https://x.example)", "[half](", "", "", "", "\r", "- [x] t", "1", "+", "<br>", "\\"),
]
MARKS = [*"*_`[]()<>#|-~  \n\n1.:a\\!", "https://a.example", "**", "```", "](https://a.example)"]


def test_a_stream_cut_anywhere_is_shown_as_the_whole(page: Page, mock_server: str) -> None:
    page.goto(mock_server)
    dice = random.Random(47)
    texts = ["\n\n".join(text for text, _ in BLOCKS + INLINE)]
    texts += ["\n".join(dice.choices(PIECES, k=dice.randrange(2, 16))) for _ in range(400)]
    texts += ["".join(dice.choices(MARKS, k=dice.randrange(5, 80))) for _ in range(400)]
    for text in texts:
        whole = shown(page, text)
        assert shown(page, text, list(range(1, len(text)))) == whole, text
        cuts = sorted(dice.sample(range(len(text) + 1), min(4, len(text))))
        assert shown(page, text, cuts) == whole, (text, cuts)


def test_what_is_settled_is_not_made_again(page: Page, mock_server: str) -> None:
    page.goto(mock_server)
    found = page.evaluate("""() => {
      const root = document.createElement("div");
      const view = new Markdown(root);
      const longest = [];
      for (const unit of ["A paragraph *of* words.\\n\\n", "- an item\\n", "1. a step\\n\\n", "# A heading\\n"]) {
        for (let index = 0; index < 100; index++) {
          view.write(unit);
          view.paint();
          longest.push(view.rest.length / unit.length);
        }
      }
      const first = root.firstChild;
      view.write("```py\\n");
      view.paint();
      const button = root.querySelector("button");
      view.write("x = 1\\n");
      view.paint();
      return [Math.max(...longest), root.firstChild === first, root.querySelector("button") === button,
              root.querySelector("code:not(p code)").textContent];
    }""")
    assert found[0] <= 5 and found[1:] == [True, True, "x = 1\n"]


HUGE = 100_000
REPEATED = ["*a ", "**a*", "_a", "*", "[", "[a](", "[]", '[a](x "', "![", "<br", ">", "> ", "\n", "1. ", "\\"]
AROUND = [  # (before, what is repeated, after)
    ("`", " ``` `` ", ""),
    *(("](", " ", ""), ("[a](x", "y", ""), ("[a](", "(", ""), ("# ", " ", "x"), ("#", " #", "x"), ("-", " ", "x")),
    *(("```", "a", "`"), ("https://", "a", ""), ("https://x", ".", "x"), ("`a", " ", "b`"), ("", " ", "x")),
    ("", "- ", "x"),
]
HARD = [
    *(text * HUGE for text in REPEATED),
    *(before + text * HUGE + after for before, text, after in AROUND),
    "|" * HUGE + "\n" + "|-" * HUGE,
    "a|b\n-|-\n" + "|\n" * 20_000,
    " ".join("`" * length for length in range(450)),
    "\n".join("  " * depth + "- a" for depth in range(300)),
    "\n".join("> " * depth + "a" for depth in range(300)),
]


def test_hostile_text_takes_a_bounded_time(page: Page, mock_server: str) -> None:
    page.goto(mock_server)
    for index, text in enumerate(HARD):
        then = f"document.body.dataset.shown = '{index}'"
        page.evaluate(f"text => setTimeout(() => {{ ({SHOWN})([text, [text.length]]); {then}; }})", text)
        expect(page.locator("body")).to_have_attribute("data-shown", str(index), timeout=_PATIENCE_S * 1e3)
