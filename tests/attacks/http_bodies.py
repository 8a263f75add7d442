"""Attacks by what a request says: JSON that is no request, or asks for too much."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from tests.attacks.http_client import CHAT, COMPLETIONS, TOKENIZE, at_once, exchange, head, post
from tests.attacks.http_messages import question
from tests.attacks.registry import NONE, Answer, Site, attack

_MIB = 2**20
_LONG_S = 60.0  # for texts that take seconds each


def _prompt(site: Site, text: str) -> bytes:
    return json.dumps({"model": site.model, "prompt": text}).encode()


@attack()
def bodies_of_4_to_20_megabytes(site: Site) -> Iterator[Answer]:
    """More than is taken, of a known length and in chunks: 413 arrives though the client reads only at the end."""
    for size in (4 * _MIB + 1, 5_000_000, 8_000_000, 20_000_000):
        body = b'{"model": "' + b"x" * size + b'"}'
        yield post(site, COMPLETIONS, body)
        start = head(site, COMPLETIONS, 0, content_length="", transfer_encoding="chunked")
        parts = [b"10000\r\n" + body[at : at + 65536].ljust(65536) + b"\r\n" for at in range(0, size, 65536)]
        yield from exchange(site, start, *parts, b"0\r\n\r\n")


@attack("200")
def tokenize_4_megabytes(site: Site) -> Iterator[Answer]:
    """One text as long as a body may be."""
    yield post(site, TOKENIZE, _prompt(site, "word and " * 466_000), patience=_LONG_S)


@attack("200", NONE)
def tokenize_4_megabytes_twenty_at_once(site: Site) -> Iterator[Answer]:
    """Twenty such texts side by side, from clients who do not wait for all of them."""
    body = _prompt(site, "word and " * 466_000)
    yield from at_once([lambda: post(site, TOKENIZE, body, patience=4.0)] * 20)


@attack("200")
def detokenize_a_million_ids(site: Site) -> Iterator[Answer]:
    """The same in the other direction."""
    yield post(site, "/detokenize", json.dumps({"tokens": [9] * 1_000_000}).encode(), patience=_LONG_S)


@attack()
def refused_long_prompts(site: Site) -> Iterator[Answer]:
    """Hundreds of prompts that are too long for the context, many of one request."""
    words = "word " * 10_000
    for _ in range(10):
        yield post(site, COMPLETIONS, {"model": site.model, "prompt": [words] * 60, "max_tokens": 1})
    messages = [{"role": "user", "content": words}]
    for _ in range(10):
        yield post(site, CHAT, {"model": site.model, "messages": messages, "n": 8, "stream": True})


@attack("200")
def unknown_field_of_a_megabyte(site: Site) -> Iterator[Answer]:
    """A name that nobody knows is not sent back whole; neither are half a million of them."""
    answer = post(site, COMPLETIONS, question(site, **{"x" * _MIB: 1}))
    assert len(answer.reason) < 2000, f"the answer has {len(answer.reason)} characters"
    yield answer
    yield post(site, COMPLETIONS, question(site, **{str(number): [] for number in range(300_000)}))
    for field in ("user", "model", "stop", "seed", "messages"):
        answer = post(site, COMPLETIONS, question(site, **{field: "y" * _MIB}))
        assert len(answer.reason) < 2000, f"the answer to a long {field} has {len(answer.reason)} characters"
        yield answer


@attack()
def deep_json(site: Site) -> Iterator[Answer]:
    """Lists in lists in lists, and objects."""
    for deep in (b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000):
        yield post(site, COMPLETIONS, deep)
        yield post(site, COMPLETIONS, b'{"model": "m", "prompt": ' + deep + b"}")


@attack()
def huge_numbers(site: Site) -> Iterator[Answer]:
    """Numbers that are none, or none that fit."""
    for field in ("seed", "max_tokens", "temperature", "top_k", "n", "min_tokens", "logprobs"):
        for number in (b"1e999", b"-1e999", b"9" * 5000, b"1" + b"0" * 100_000, b"NaN", b"-Infinity", b"0.5e-400"):
            if number != b"0.5e-400" or field in ("max_tokens", "n"):  # 0 is a value of the others
                yield post(
                    site,
                    COMPLETIONS,
                    b'{"model": "%s", "prompt": "a", "%s": %s}' % (site.model.encode(), field.encode(), number),
                )


@attack()
def bad_utf8(site: Site) -> Iterator[Answer]:
    """Bytes that are no text, and halves of characters."""
    texts = (b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\xc0\xaf", b"\\ud800", b"\\udc00\\ud800")
    for text in texts:
        yield post(site, COMPLETIONS, b'{"model": "' + text + b'", "prompt": "a"}')
        yield post(site, TOKENIZE, b'{"prompt": "' + text + b'"}')
        for field in (b'"tools": "%s"', b'"tools": ["%s"]', b'"chat_template_kwargs": {"a": "%s"}'):
            chat = b'{"messages": [{"role": "user", "content": "a"}], ' + field % text + b"}"
            yield post(site, CHAT, chat)
        yield post(site, TOKENIZE, chat)


@attack()
def no_json(site: Site) -> Iterator[Answer]:
    """Bodies that are cut off, empty, of another kind."""
    for body in (b"", b"{", b"null", b"[]", b"0", b'"', b"{}{}", b"\x00", b"\xff\xfe{\x00}\x00", b"model=x", b"<x/>"):
        for path in (COMPLETIONS, CHAT, TOKENIZE, "/detokenize"):
            yield post(site, path, body)


@attack()
def hostile_n(site: Site) -> Iterator[Answer]:
    """More choices and prompts than are made."""
    for n in (9, 1024, 10**9, 2**63, 2**64, 10**30, -1, 0, 1.5, "9", [8], True):
        yield post(site, COMPLETIONS, question(site, n=n))
    yield post(site, COMPLETIONS, question(site, prompt=["a"] * 65))
    yield post(site, COMPLETIONS, question(site, prompt=["a"] * 500_000))
    yield post(site, COMPLETIONS, question(site, prompt=[[1]] * 500_000))


@attack("200")
def as_many_choices_as_may_be(site: Site) -> Iterator[Answer]:
    """512 choices in one request, four times side by side."""
    body = question(site, prompt=["a"] * 64, n=8, max_tokens=4)
    yield from at_once([lambda: post(site, COMPLETIONS, body)] * 4)


@attack("200")
def many_stop_strings(site: Site) -> Iterator[Answer]:
    """As long and as many as are taken, where each is looked for in every token; and more."""
    stops = [f"{'a' * 254}{number}" for number in range(10, 74)]
    body = question(site, stop=stops, n=8, max_tokens=400, ignore_eos=True)
    yield from at_once([lambda: post(site, COMPLETIONS, body)] * 8)
    for stop in (["a"] * 65, ["a" * 257], [""], ["a"] * 100_000, [["a"]], {"a": 1}):
        answer = post(site, COMPLETIONS, question(site, stop=stop))
        assert answer.code == "400", f"{str(stop)[:40]}: {answer}"


@attack("200")
def logit_bias_bombs(site: Site) -> Iterator[Answer]:
    """As many ids as are taken, and more; ids that are none."""
    most = {str(token): 1.0 for token in range(1024)}
    yield from at_once([lambda: post(site, COMPLETIONS, question(site, logit_bias=most, n=8))] * 16)
    many: dict[str, object] = {str(n): 1 for n in range(200_000)}
    for bomb in (many, {"1" * 5000: 1}, {"-1": 1}, {"٣": 1}, {"1": 1e9}, {"1": None}, {"": 1}):
        answer = post(site, COMPLETIONS, question(site, logit_bias=bomb))
        assert answer.code == "400", f"{str(bomb)[:40]}: {answer}"


@attack("200")
def all_the_log_probabilities(site: Site) -> Iterator[Answer]:
    """Echoed prompts with as many alternatives as there are."""
    body = question(site, prompt=[5] * 8000, echo=True, logprobs=20, max_tokens=0)
    yield from at_once([lambda: post(site, COMPLETIONS, body)] * 2)


@attack("200")
def mutated_bodies(site: Site) -> Iterator[Answer]:
    """Good bodies in which a value is another one, or a byte is."""
    dice = random.Random(2)
    values = (None, True, -1, 0, 2**63, 1e308, "", "x" * 600, "\0", "\U0001f600")
    values += ([], {}, [[]], {"a": 1}, [None] * 70)
    good = question(site, temperature=1, seed=1, stop=["x"], logit_bias={"1": 1}, n=2, echo=False, logprobs=1)
    for _ in range(200):
        body = dict(good)
        for field in dice.sample(sorted(good), 2):
            body[field] = dice.choice(values)
        raw = bytearray(json.dumps(body).encode())
        if dice.random() < 0.5:
            raw[dice.randrange(len(raw))] = dice.randrange(256)
        yield post(site, dice.choice((COMPLETIONS, CHAT)), bytes(raw))
