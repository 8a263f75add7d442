"""Structured output over HTTP: what reaches the target, and grammars that are wrong, huge or hostile."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from ssd.config.engine import Limits, ServerConfig
from ssd.config.params import Structured
from ssd.frontend.text_jobs import Compile, Job, TextWorker
from ssd.frontend.text_pool import TextPool
from ssd.grammar.matcher import GrammarCompiler
from ssd.grammar.source import serialized
from ssd.models.pull import BUILTIN
from tests.frontend.http_engine import HttpEngine, answering, http_engine, key_file

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Why?"}]}
RAW: dict[str, Any] = {"prompt": "Why?"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
IDS = [35, 28120]


def tags(begin: str = "<f=a>", *triggers: str) -> str:
    structures = [{"begin": begin, "schema": SCHEMA, "end": "</f>"}, {"begin": "<f=b>", "schema": {}, "end": ""}]
    return json.dumps({"structures": structures, "triggers": triggers or ["<f="]}, separators=(",", ":"))


TAGS = tags()


@pytest.fixture(scope="module")
def scripted() -> Iterator[HttpEngine]:
    with http_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def http() -> Iterator[HttpEngine]:
    with http_engine() as engine, answering(engine, IDS):
        yield engine


def by_tags(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"structural_tag": text}}


def as_json(schema: object) -> Structured:
    return Structured("json", json.dumps(schema, separators=(",", ":")))


ASKED: list[tuple[dict[str, Any], Structured]] = [
    ({"response_format": {"type": "json_object"}}, Structured("json_object")),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        as_json(SCHEMA),
    ),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, as_json(SCHEMA)),
    ({"structured_outputs": {"json": SCHEMA}}, as_json(SCHEMA)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA, separators=(",", ":"))}}, as_json(SCHEMA)),
    ({"structured_outputs": {"regex": "[a-z]+"}}, Structured("regex", "[a-z]+")),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, Structured("choice", '["yes","no"]')),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Structured("grammar", 'start: "a"')),
    ({"structured_outputs": {"json_object": True}}, Structured("json_object")),
    ({"guided_json": SCHEMA}, as_json(SCHEMA)),
    ({"guided_regex": "a|b"}, Structured("regex", "a|b")),
    ({"guided_choice": ["yes", "no"]}, Structured("choice", '["yes","no"]')),
    ({"guided_grammar": 'root ::= "a" | "b"'}, Structured("grammar", 'root ::= "a" | "b"')),
    ({"grammar": 'root ::= [a-c]+ "x"?'}, Structured("grammar", 'root ::= [a-c]+ "x"?')),
    ({"json_schema": SCHEMA}, as_json(SCHEMA)),
    ({"json_schema": SCHEMA, "guided_json": "", "guided_regex": "", "guided_grammar": ""}, as_json(SCHEMA)),
    ({"structured_outputs": {"structural_tag": TAGS}}, Structured("structural_tag", TAGS)),
    ({"response_format": {"type": "structural_tag", **json.loads(TAGS)}}, Structured("structural_tag", TAGS)),
]


@pytest.mark.parametrize(("fields", "asked"), ASKED, ids=lambda value: str(value)[:50])
@pytest.mark.parametrize(("path", "body"), [(CHATS, CHAT), (COMPLETIONS, RAW)])
def test_the_target_gets_what_a_body_asks_for(
    scripted: HttpEngine, path: str, body: dict[str, Any], fields: dict[str, Any], asked: Structured
) -> None:
    connection = scripted.begin(path, **body, **fields, n=2)
    submits = [scripted.engine.target.next_submit() for _ in range(2)]
    assert {s.params.structured for s in submits} == {Structured("compiled", serialized(asked))}
    connection.close()


MANY_KEYS = {"type": "object", "properties": {f"p{i}": {} for i in range(600)}, "additionalProperties": False}


@pytest.mark.parametrize(("path", "stream"), [(CHATS, True), (COMPLETIONS, False)])
@pytest.mark.parametrize(
    ("fields", "param", "cause"),
    [
        ({"guided_regex": "[a-"}, "guided_regex", "regex"),
        ({"structured_outputs": {"json": {"type": "objekt"}}}, "structured_outputs.json", "objekt"),
        ({"structured_outputs": {"grammar": "root ::= b"}}, "structured_outputs.grammar", "'b' not found"),
        ({"guided_json": {"not": {}, "x-guidance": {"lenient": False}}}, "guided_json", "not"),
        ({"response_format": {"type": "json_object", "schema": [1]}}, "response_format", "object"),
        ({"guided_json": {"$ref": "http://localhost:1/x"}}, "guided_json", "http://localhost:1/x"),
        ({"guided_json": {"$ref": "file:///etc/passwd"}}, "guided_json", "file:///etc/passwd"),
        ({"guided_json": False}, "guided_json", "schema false"),
        (by_tags(tags("<g>")), "structured_outputs.structural_tag", "no trigger begins '<g>'"),
        (by_tags(tags("<f=a>", "<f=", "f")), "structured_outputs.structural_tag", "'f' lies in another"),
        (by_tags(tags("<f=a>", "<f=", "<x")), "structured_outputs.structural_tag", "'<x' begins none"),
        (by_tags("{}"), "structured_outputs.structural_tag", "structures"),
        (by_tags('{"format": {}}'), "structured_outputs.structural_tag", "format"),
        (by_tags("{"), "structured_outputs.structural_tag", "truncated"),
        ({"json_schema": {"type": "string", "pattern": "a", "maxLength": 0}}, "json_schema", "structured output"),
        ({"guided_json": MANY_KEYS}, "guided_json", "Current row"),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    http: HttpEngine, path: str, stream: bool, fields: dict[str, Any], param: str, cause: str
) -> None:
    body = CHAT if path == CHATS else RAW
    for _ in range(2):  # the second answer is remembered
        status, answer = http.post(path, **body, **fields, stream=stream)
        assert (status, answer["error"]["param"]) == (400, param)
        assert cause in answer["error"]["message"]


def test_a_key_never_gets_a_grammar_that_was_compiled_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time would tell who has used a schema."""
    compiled, do = [], TextPool.do

    def counting(pool: TextPool, worker: TextWorker, job: Job) -> asyncio.Future[Any]:
        compiled.append(isinstance(job, Compile))
        return do(pool, worker, job)

    monkeypatch.setattr(TextPool, "do", counting)
    server = ServerConfig(names=("scripted",), port=0, api_key_file=key_file(tmp_path, "sesame", "other"))
    with http_engine(server) as engine, answering(engine, IDS):
        for key, more, most in (
            ("sesame", {}, 1),
            ("sesame", {}, 1),
            ("other", {}, 2),
            ("other", {"cache_salt": "a"}, 3),
            ("sesame", {"cache_salt": "a"}, 4),
            ("other", {}, 4),
        ):
            assert engine.post(CHATS, {"x-api-key": key}, **CHAT, guided_json=SCHEMA, **more)[0] == 200
            assert sum(compiled) == most


@pytest.mark.parametrize("text", ["a<|im_end|>b", "<|im_end|>", "x<repo_name>y", "a\u007f\u0085\u2028b"])
@pytest.mark.parametrize("as_choice", [True, False])
def test_text_that_is_spelled_like_a_special_token_is_text(as_choice: bool, text: str) -> None:
    directory = BUILTIN["smollm2-draft"].directory
    asked = Structured("choice", json.dumps([text])) if as_choice else Structured("json", json.dumps({"const": text}))
    answer = GrammarCompiler(directory, 49_152, [2]).compile(serialized(asked)).begin()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    output: list[int] = []
    while (possible := set(np.flatnonzero(answer.masks(output)[0]).tolist())) != {2}:
        assert not possible & special
        output.append(min(possible))
    said = tokenizer.decode(output, skip_special_tokens=False)
    assert (said if as_choice else json.loads(said)) == text


def test_structural_tags_leave_text_free_and_oblige_what_triggers_begin() -> None:
    grammar, words = serialized(Structured("structural_tag", TAGS)), LLTokenizer("byte")

    def allows(text: str) -> bool:
        matcher = LLMatcher(words, grammar, log_level=0)
        return matcher.consume_tokens(words.tokenize_str(text)) and matcher.is_accepting()

    for text in ("", "x <f", 'a <f=a>{"a":1}</f> b', "<f=b>[1] and more", '<f=b>2<f=a>{"a": 1}</f>'):
        assert allows(text), text
    for text in ('<f=a>{"a":"1"}</f>', "text <f=c>", "<f=b>", '<f=a>{"a":1}'):
        assert not allows(text), text


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


SLOW = f"start: /{'(a|a)*' * 40_000}/"
HOSTILE: list[dict[str, Any]] = [
    {"guided_regex": "(" * 20_000 + "a" + ")" * 20_000},
    {"guided_regex": "(a|a)*" * 5_000},
    {"guided_regex": "(((((a{1,99}){1,99}){1,99}){1,99}){1,99}){1,99}"},
    {"guided_regex": "(.*a.{999}){99}"},
    {"guided_json": nested(150)},
    {"guided_json": {"type": "array", "minItems": 10**9, "items": {"type": "string", "minLength": 10**9}}},
    {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 50}}}},
    {"guided_json": {"allOf": [{"anyOf": [{"pattern": f"{c}{d}"} for d in "abcdef"]} for c in "abcdefghijkl"]}},
    {"guided_grammar": "start: A\nA: " + " & ".join(f"/(.*{c}.{{15}})/" for c in "abcdefgh")},
    {"guided_grammar": "root ::= " + "(" * 30_000},
    {"guided_grammar": "root ::= " + '"a" | ' * 9_000 + '"b"'},
    {"guided_choice": ["a" * 15] * 4_000},
]


@pytest.mark.timeout(120)
def test_hostile_grammars_stall_nobody(http: HttpEngine) -> None:
    answers: list[int] = []

    def ask(fields: dict[str, Any]) -> None:
        answers.append(http.post(CHATS, **CHAT, **fields)[0])

    threads = [threading.Thread(target=ask, args=(fields,)) for fields in HOSTILE]
    for thread in threads:
        thread.start()
    others = 0
    while any(thread.is_alive() for thread in threads):
        assert http.post(CHATS, **CHAT)[0] == 200
        others += 1
    assert others > len(HOSTILE), "others do not wait for grammars"
    assert len(answers) == len(HOSTILE) and set(answers) <= {200, 400}
    assert http.post(CHATS, **CHAT, guided_regex="[a-z]+")[0] == 200


def test_the_engine_limits_grammars() -> None:
    limits = Limits(max_grammar_bytes=2**18)
    full = 'start: "a" //' + "é" * (2**17 - 7) + "a"
    assert len(full.encode()) == 2**18
    with http_engine(ServerConfig(names=("scripted",), port=0, limits=limits)) as engine, answering(engine, IDS):
        assert engine.post(CHATS, **CHAT, guided_grammar=full)[0] == 200
        for source, cause in ((full + "a", "262145 bytes; at most 262144"), (SLOW, "2 s of processor time")):
            status, answer = engine.post(CHATS, **CHAT, guided_grammar=source)
            assert (status, answer["error"]["param"]) == (400, "guided_grammar")
            assert cause in answer["error"]["message"]
        assert engine.post(CHATS, **CHAT, guided_regex="[a-z]+")[0] == 200
