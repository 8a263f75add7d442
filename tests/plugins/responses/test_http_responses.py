"""`/v1/responses`: items in, items out, streamed or not, and what is kept of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from ssd.config.engine import ServerConfig
from ssd.frontend.http.errors import HttpError
from ssd.ipc.messages import Emission
from ssd.plugins.responses import answers, responses
from ssd.plugins.responses.store import Item, ResponseStore, Turn
from tests.frontend.http_engine import HttpEngine
from tests.frontend.tool_model import CALL, FUNCTION, TEMPLATE, WEATHER, Thinker, saying, thinking

PATH = "/v1/responses"
STRICT_NOT = {"type": "json_schema", "schema": {"not": {}}, "strict": True}
FLAT = {"type": "function", **FUNCTION}
ASKED: dict[str, Any] = {"input": "Why?", "max_output_tokens": 300}
JSON, CUSTOM = {"type": "json_object"}, {"type": "custom", "name": "f"}
IMAGE = {"type": "input_image", "image_url": "data:,"}
SEEN = {"type": "function_call_output", "call_id": "c1", "output": [IMAGE]}
TURN = [{"role": "user", "content": "Why?"}]


def events(engine: HttpEngine, **body: Any) -> list[dict[str, Any]]:
    """Every event of a stream. Each has the next number."""
    found = engine.typed_events(PATH, **ASKED | body)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def nameless(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without what is new in every answer."""
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in output]


def text(item: dict[str, Any]) -> str:
    (part,) = item["content"]
    return str(part["text"])


def test_an_answer_has_thoughts_texts_and_calls_in_their_order(thinker: Thinker) -> None:
    with saying(thinker, f"<think>Hm.</think>See:\n{CALL}\n{CALL}\nDone.") as engine:
        status, whole = engine.post(PATH, **ASKED, tools=[FLAT], metadata={"a": "b"}, text={"verbosity": "low"})
        assert status == 200, whole
        assert [item["type"] for item in whole["output"]] == ["reasoning", "message", *["function_call"] * 2, "message"]
        assert [text(whole["output"][at]) for at in (0, 1, 4)] == ["Hm.", "See:", "\nDone."]
        assert all(json.loads(call["arguments"]) == {"city": "São Paulo"} for call in whole["output"][2:4])
        assert len({call["call_id"] for call in whole["output"][2:4]}) == 2
        assert (whole["object"], whole["status"], whole["metadata"]) == ("response", "completed", {"a": "b"})
        assert whole["usage"]["total_tokens"] == whole["usage"]["input_tokens"] + whole["usage"]["output_tokens"]
        assert whole["tools"] == [FLAT]

        streamed = events(engine, tools=[FLAT])
        assert nameless(streamed[-1]["response"]["output"]) == nameless(whole["output"])
        assert streamed[-1]["type"] == "response.completed"


def test_a_stream_builds_each_item_up(thinker: Thinker) -> None:
    with saying(thinker, f"<think>Hm.\n\nSo.</think>See:\n{CALL}") as engine:
        streamed = events(engine, tools=[FLAT])
    assert [event["type"] for event in streamed[:2]] == ["response.created", "response.in_progress"]
    assert all(event["response"]["status"] == "in_progress" for event in streamed[:2])
    for index, item in enumerate(streamed[-1]["response"]["output"]):
        about = [event for event in streamed if event.get("output_index") == index]
        assert (
            about[0]["item"] | {"status": item["status"]} | {k: item[k] for k in ("content", "arguments") if k in item}
            == item
        )
        assert about[-1]["item"] == item
        told = "".join(event["delta"] for event in about if event["type"].endswith(".delta"))
        assert told == (item["arguments"] if item["type"] == "function_call" else text(item))
        assert {event["item_id"] for event in about[1:-1]} == {item["id"]}


def test_a_cut_answer_is_incomplete(thinker: Thinker) -> None:
    with saying(thinker, "One two three four.") as engine:
        _, whole = engine.post(PATH, input="Why?", max_output_tokens=2)
        assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert whole["output"][0]["status"] == "incomplete" and text(whole["output"][0]) == "One two"
        first, *_, last = events(engine, max_output_tokens=2)
        assert (first["response"]["status"], last["type"]) == ("in_progress", "response.incomplete")


def test_an_error_in_the_middle_is_the_last_event(thinker: Thinker) -> None:
    connection = thinker.engine.begin(PATH, **ASKED, stream=True)
    target = thinker.engine.engine.target
    request = target.next_submit().request
    target.step(Emission(request, thinker.tokenizer.encode("One")))
    answer = connection.getresponse()
    while b"delta" not in answer.readline():
        pass
    target.step(Emission(request, [], finish_reason="error", error="it broke"))
    last = answer.read().decode().strip().split("\n\n")[-1]
    assert last.startswith("event: error\n") and json.loads(last.split("data: ")[1])["message"] == "it broke"


# -- what is asked --------------------------------------------------------------------------------------------------


def prompt(thinker: Thinker, **body: Any) -> str:
    """What the model is told."""
    return thinker.prompt(PATH, **ASKED | body)


def test_instructions_come_first(thinker: Thinker) -> None:
    assert prompt(thinker, instructions="Be brief.") == "<system>Be brief.<user>Why?<assistant>"
    assert prompt(thinker, tools=[FLAT]) == f"[{json.dumps(WEATHER)}]<user>Why?<assistant>"


def test_items_become_messages(thinker: Thinker) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "Why"}, {"type": "input_text", "text": "?"}],
        },
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "See:", "annotations": []}],
            "status": "completed",
        },
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call", "call_id": "c2", "name": "get_weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "Sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "Rain"}]},
        {"type": "message", "role": "assistant", "content": "So."},
    ]
    calls = "".join(f"<tool_call>{id} get_weather {city}</tool_call>" for id, city in (("c1", "Rome"), ("c2", "Oslo")))
    expected = f"<system>Be brief.<user>Why?<assistant><think>Hm.</think>See:{calls}"
    results = "<tool get_weather>Sunny<tool get_weather>Rain"
    assert prompt(thinker, input=items) == f"{expected}{results}<assistant>So.<assistant>"


def test_a_format_and_a_choice_of_tools_reach_the_target_as_in_a_chat(thinker: Thinker) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    format = {"type": "json_schema", "name": "x", "strict": True, "schema": schema}
    in_chat = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    by_name = {"type": "function", "name": "get_weather"}
    for fields, chat in (
        ({"text": {"format": format}}, in_chat),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        ({"tools": [FLAT], "tool_choice": "required"}, {"tools": [WEATHER], "tool_choice": "required"}),
        (
            {"tools": [FLAT], "tool_choice": by_name},
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        ),
    ):
        found = thinker.engine.submitted(PATH, **ASKED, **fields).params.structured
        assert found is not None
        assert found == thinker.engine.submitted("/v1/chat/completions", messages=TURN, **chat).params.structured
    with saying(thinker, '{"a": 1}') as engine:
        status, answer = engine.post(PATH, **ASKED, text={"format": format})
        assert (status, answer["text"], text(answer["output"][0])) == (200, {"format": format}, '{"a": 1}')


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"background": True}, "background", "unsupported_parameter"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "invalid_value"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "missing_parameter"),
        ({"text": {"format": STRICT_NOT}}, "text.format", "invalid_request"),
        ({"text": {"format": JSON}, "tools": [FLAT], "response_format": JSON}, "text.format", "invalid_value"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": [CUSTOM], "tool_choice": CUSTOM}, "tool_choice.type", "unsupported_parameter"),
        ({"tools": [CUSTOM], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "invalid_value"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_parameter"),
        ({"tools": [FLAT], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "invalid_value"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id", "missing_parameter"),
        ({"input": None}, "input", "missing_parameter"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type", "unsupported_parameter"),
        ({"input": [SEEN]}, "input[0].output[0].type", "unsupported_parameter"),
        ({"input": [{"type": "computer_call_output", "call_id": "c1"}]}, "input[0].type", "unsupported_parameter"),
        ({"tools": [FLAT], "tool_choice": {"type": "web_search"}}, "tool_choice.type", "unsupported_parameter"),
        ({"input": [SEEN]}, "input[0].output[0].type", "unsupported_parameter"),
        ({"input": [{"type": "computer_call_output", "call_id": "c1"}]}, "input[0].type", "unsupported_parameter"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing_parameter"),
        ({"input": [{"content": "x"}]}, "input[0].role", "missing_parameter"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments", "missing_parameter"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output", "missing_parameter"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": "a " * 10_000}, "input", "context_length_exceeded"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_answered_is_refused(thinker: Thinker, fields: dict[str, Any], param: str, code: str) -> None:
    status, answer = thinker.engine.post(PATH, **{**ASKED, **fields})
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code), answer


# -- what is kept ---------------------------------------------------------------------------------------------------


def test_a_conversation_goes_on_from_a_response(thinker: Thinker) -> None:
    with saying(thinker, f"<think>Hm.</think>See:\n{CALL}") as engine:
        _, first = engine.post(PATH, **ASKED, instructions="Be brief.", tools=[FLAT])
    assert first["store"] is True and first["previous_response_id"] is None
    call = first["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Sunny"}
    said = f"<user>Why?<assistant><think>Hm.</think>See:<tool_call>{call['call_id']} get_weather São Paulo</tool_call>"
    expected = f"{said}<tool get_weather>Sunny<assistant>"
    assert prompt(thinker, previous_response_id=first["id"], input=[result]) == expected, "no instructions of before"
    with saying(thinker, "Warm.") as engine:
        _, second = engine.post(PATH, input=[result], previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    asked = {"previous_response_id": second["id"], "input": "And now?"}
    third = expected.removesuffix("<assistant>") + "<assistant>Warm.<user>And now?<assistant>"
    assert prompt(thinker, **asked) == third
    assert thinker.engine.ask("DELETE", f"{PATH}/{first['id']}")[0] == 200
    assert prompt(thinker, **asked) == third, "a later response has the items of its conversation"


@pytest.mark.parametrize("of_type", [{"type": "item_reference"}, {}], ids=["typed", "bare"])
def test_items_are_referred_to_by_their_ids(thinker: Thinker, of_type: dict[str, str]) -> None:
    with saying(thinker, "<think>Hm.</think>See.") as engine:
        _, first = engine.post(PATH, **ASKED)
    ids = [item["id"] for item in (*input_items(thinker, first), *first["output"])]
    items = [*({**of_type, "id": id} for id in ids), {"role": "user", "content": "So?"}]
    assert prompt(thinker, input=items) == "<user>Why?<assistant><think>Hm.</think>See.<user>So?<assistant>"
    status, answer = thinker.engine.post(PATH, input=[*items, {**of_type, "id": "msg_none"}])
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (404, "input[4].id", "item_not_found")
    with saying(thinker, "So.") as engine:
        _, second = engine.post(PATH, input=items)
        shown = input_items(thinker, second)
        assert [item["id"] for item in shown[:3]] == ids and shown[1:3] == first["output"]
    thinker.engine.ask("DELETE", f"{PATH}/{first['id']}")
    del first
    assert prompt(thinker, input=items) == "<user>Why?<assistant><think>Hm.</think>See.<user>So?<assistant>"


def test_an_id_that_a_client_chooses_reads_and_replaces_no_item(thinker: Thinker) -> None:
    """Without keys, or with one, strangers share the store: only ids made here, at random, refer to items."""
    mine = {"role": "user", "content": "My secret.", "id": "msg_1"}
    with saying(thinker, "See.") as engine:
        _, first = engine.post(PATH, input=[mine])
        assert input_items(thinker, first)[0]["id"] == "msg_1"
        for reference in ({"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}):
            status, answer = engine.post(PATH, input=[reference, *TURN])
            assert (status, answer["error"]["code"]) == (404, "item_not_found")
        said = first["output"][0]
        forged = {**said, "content": [{"type": "output_text", "text": "Forged."}]}
        _, second = engine.post(PATH, input=[*TURN, forged])
        assert input_items(thinker, second)[1]["id"] == said["id"]
    assert prompt(thinker, input=[*TURN, {"id": said["id"]}]) == "<user>Why?<assistant>See.<assistant>"


def test_a_kept_response_is_as_it_was_answered(thinker: Thinker) -> None:
    with saying(thinker, f"<think>Hm.</think>See:\n{CALL}") as engine:
        _, whole = engine.post(PATH, **ASKED, tools=[FLAT], metadata={"a": "b"}, text={"verbosity": "low"})
        streamed = events(engine, tools=[FLAT])
    for answer in (whole, streamed[-1]["response"]):
        status, _, content = thinker.engine.ask("GET", f"{PATH}/{answer['id']}")
        assert (status, json.loads(content)) == (200, answer)
    assert streamed[0]["response"]["store"] is True and streamed[0]["response"]["id"] == answer["id"]
    status, _, content = thinker.engine.ask("GET", f"{PATH}/{whole['id']}?stream=true")
    assert (status, json.loads(content)["error"]["param"]) == (400, "stream")
    status, _, content = thinker.engine.ask("DELETE", f"{PATH}/{whole['id']}")
    assert (status, json.loads(content)) == (200, {"id": whole["id"], "object": "response", "deleted": True})
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        assert thinker.engine.ask(method, f"{PATH}/{whole['id']}{path}")[0] == 404


def test_what_is_not_to_be_kept_is_not(thinker: Thinker) -> None:
    with saying(thinker, "See.") as engine:
        _, whole = engine.post(PATH, **ASKED, store=False)
        assert whole["store"] is False
        assert events(engine, store=False)[-1]["response"]["store"] is False
        status, answer = engine.post(PATH, **ASKED, previous_response_id=whole["id"])
    assert (status, answer["error"]["param"]) == (404, "previous_response_id")
    assert "store false" in answer["error"]["message"] and "restart" in answer["error"]["message"]
    status, answer = thinker.engine.post(PATH, input=[{"type": "item_reference", "id": whole["output"][0]["id"]}])
    assert (status, answer["error"]["code"]) == (404, "item_not_found")


def input_items(thinker: Thinker, response: Any) -> list[Any]:
    """All items that a response has answered, in their order."""
    items: list[Any] = json.loads(
        thinker.engine.ask("GET", f"{PATH}/{response['id']}/input_items?order=asc&limit=100")[2]
    )["data"]
    return items


def test_input_items_come_in_pages(thinker: Thinker) -> None:
    with saying(thinker, "See.") as engine:
        _, first = engine.post(PATH, **ASKED)
        _, second = engine.post(PATH, input=[{"role": "user", "content": "So?"}] * 2, previous_response_id=first["id"])

    def page(query: str) -> Any:
        return json.loads(thinker.engine.ask("GET", f"{PATH}/{second['id']}/input_items{query}")[2])

    whole = page("?order=asc")
    assert [text(item) for item in whole["data"]] == ["Why?", "See.", "So?", "So?"]
    assert whole["data"][1] == first["output"][0] and whole["data"][0]["role"] == "user"
    assert (whole["object"], whole["has_more"]) == ("list", False)
    assert page("")["data"] == whole["data"][::-1]
    part = page(f"?order=asc&limit=1&after={whole['first_id']}")
    assert part["data"] == whole["data"][1:2] and part["has_more"] is True
    for query, param in (("?limit=0", "limit"), ("?limit=x", "limit"), ("?order=up", "order"), ("?after=x", "after")):
        assert page(query)["error"]["param"] == param


def test_the_tokens_of_a_prompt_are_counted(thinker: Thinker) -> None:
    with saying(thinker, "See.") as engine:
        _, first = engine.post(PATH, **ASKED, tools=[FLAT])
        more = {"input": "So?", "previous_response_id": first["id"], "tools": [FLAT], "instructions": "Be brief."}
        status, counted = engine.post(f"{PATH}/input_tokens", **more)
        assert (status, counted["object"]) == (200, "response.input_tokens")
        _, second = engine.post(PATH, **more)
    assert counted["input_tokens"] == second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


def test_a_running_response_is_cancelled(thinker: Thinker) -> None:
    connection = thinker.engine.begin(PATH, **ASKED, stream=True)
    target = thinker.engine.engine.target
    request = target.next_submit().request
    target.step(Emission(request, thinker.tokenizer.encode("One two")))
    answer = connection.getresponse()
    answer.readline()
    name = json.loads(answer.readline().removeprefix(b"data: "))["response"]["id"]
    assert json.loads(thinker.engine.ask("GET", f"{PATH}/{name}")[2])["status"] == "in_progress"
    status, _, content = thinker.engine.ask("POST", f"{PATH}/{name}/cancel", b"")
    assert (status, json.loads(content)["status"]) == (200, "cancelled")
    target.wait_abort(request)
    last = json.loads(answer.read().decode().strip().split("data: ")[-1])
    assert last["type"] == "response.incomplete" and last["response"]["status"] == "cancelled"
    assert text(last["response"]["output"][0]) == "One two"
    assert json.loads(thinker.engine.ask("GET", f"{PATH}/{name}")[2]) == last["response"]
    status, _, content = thinker.engine.ask("POST", f"{PATH}/{name}/cancel", b"")
    assert (status, "ended" in json.loads(content)["error"]["message"]) == (400, True)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thinker]:
    """One with two keys, that keeps three responses of each in 16 KiB."""
    server = ServerConfig(names=("scripted",), port=0, api_keys=("a", "b"))
    directory = tmp_path_factory.mktemp("small")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(responses, "MOST_RESPONSES", 3)
        patched.setattr(responses, "MOST_BYTES", 2 * 16 * 2**10)
        with (
            thinking(directory, TEMPLATE, server=server, max_model_len=8192) as thinker,
            saying(thinker, "See."),
        ):
            yield thinker


def ask(small: Thinker, key: str, **body: Any) -> tuple[int, Any]:
    return small.engine.post(PATH, {"x-api-key": key}, **{**ASKED, **body})


def statuses(small: Thinker, key: str, names: list[str]) -> list[int]:
    return [small.engine.ask("GET", f"{PATH}/{name}", None, {"x-api-key": key})[0] for name in names]


def test_another_key_sees_nothing(small: Thinker) -> None:
    _, mine = ask(small, "a")
    name, item = mine["id"], mine["output"][0]["id"]
    assert ask(small, "a", previous_response_id=name)[0] == 200
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        assert small.engine.ask(method, f"{PATH}/{name}{path}", None, {"x-api-key": "b"})[0] == 404
    assert ask(small, "b", previous_response_id=name)[0] == 404
    assert ask(small, "b", input=[{"type": "item_reference", "id": item}])[0] == 404
    assert statuses(small, "a", [name]) == [200]


def test_the_least_recently_used_response_makes_room(small: Thinker) -> None:
    names = [ask(small, "a")[1]["id"] for _ in range(3)]
    assert statuses(small, "a", names[:1]) == [200], "it was used"
    others = [ask(small, "b")[1]["id"] for _ in range(4)]
    assert statuses(small, "a", names) == [200] * 3, "another key's make no room"
    assert statuses(small, "b", others) == [404, 200, 200, 200]
    assert statuses(small, "a", names[:1]) == [200]
    names.append(ask(small, "a")[1]["id"])
    assert statuses(small, "a", names[:3]) == [200, 404, 200]
    large = "why " * 2200
    kept = ask(small, "a", input=large)[1]
    assert kept["store"] is True and statuses(small, "a", [kept["id"]]) == [200]
    status, longer = ask(small, "a", input="why " * 2200, previous_response_id=kept["id"])
    assert (status, longer["store"]) == (200, False), "with what came before it is too large"
    assert statuses(small, "a", [longer["id"], kept["id"]]) == [404, 200]


def test_the_store_counts_what_it_holds() -> None:
    """A turn that was put out is counted as long as a later one has it."""
    store = ResponseStore(2, 32 << 20)
    response = answers.Response(id="r", created_at=0, model="m", text={})
    first = Turn(response, [Item("i", b"x" * 1000)], [], None)
    assert store.add("1", first) and store.held == first.bytes > 1000
    second = Turn(response, [Item("j", b"y"), Item("j", b"z")], [], first)
    both = first.bytes + second.bytes
    assert store.add("2", second) and store.held == both
    del first
    store.remove("1")
    assert store.held == both and [item.data for item in second.conversation()] == [b"x" * 1000, b"y", b"z"]
    assert store.item("i", "") == b"x" * 1000 and store.item("j", "") == b"z"
    del second
    store.remove("2")
    assert store.held == 0
    with pytest.raises(HttpError):
        store.item("i", "")


def test_items_with_one_id_are_all_kept(thinker: Thinker) -> None:
    items = [{"role": "user", "content": text, "id": "d1"} for text in ("One.", "Two.")]
    with saying(thinker, "See.") as engine:
        _, first = engine.post(PATH, input=items)
        _, second = engine.post(
            PATH, input=[{"role": "user", "content": "So?", "id": "d1"}], previous_response_id=first["id"]
        )
    page = json.loads(thinker.engine.ask("GET", f"{PATH}/{second['id']}/input_items?order=asc")[2])
    assert [text(item) for item in page["data"]] == ["One.", "Two.", "See.", "So?"]
    assert prompt(thinker, input="?", previous_response_id=first["id"]).startswith(
        "<user>One.<user>Two.<assistant>See."
    )


def test_items_that_are_referred_to_are_bounded_as_a_body_is(thinker: Thinker) -> None:
    """A body of some KiB must not become gigabytes."""
    item = {"type": "reasoning", "content": "a " * 2**17}
    with saying(thinker, "See.") as engine:
        _, kept = engine.post(PATH, input=[item, *TURN], truncate_prompt_tokens=100)
        assert kept["store"] is True
        references = [{"type": "item_reference", "id": input_items(thinker, kept)[0]["id"]}] * 100
        status, answer = engine.post(PATH, input=[*TURN, *references])
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "input", "body_too_large")


@pytest.mark.parametrize("count", [128, 129])
def test_the_calls_of_a_message_are_bounded(thinker: Thinker, count: int) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    status, answer = thinker.engine.post(f"{PATH}/input_tokens", input=[*TURN, *([call] * count)])
    assert status == (200 if count == 128 else 400), answer
    assert count == 128 or "129 calls" in answer["error"]["message"]


def test_names_in_the_braces_of_the_documentation_are_names(thinker: Thinker) -> None:
    for method, path in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        assert thinker.engine.ask(method, f"{PATH}/{{response_id}}{path}")[0] == 404
    assert thinker.engine.ask("GET", "/v1/models/{model}")[0] == 404


def test_only_tools_that_are_there_are_allowed(thinker: Thinker) -> None:
    def choose(*names: str) -> dict[str, Any]:
        allowed = [{"type": "function", "name": name} for name in names]
        return {"type": "allowed_tools", "mode": "auto", "tools": allowed}

    with saying(thinker, "See.") as engine:
        assert engine.post(PATH, **ASKED, tools=[FLAT], tool_choice=choose(FLAT["name"]))[0] == 200
        status, answer = engine.post(PATH, **ASKED, tools=[FLAT], tool_choice=choose("none"))
    assert (status, answer["error"]["param"]) == (400, "tool_choice")


def test_a_limit_of_nothing_is_named(thinker: Thinker) -> None:
    status, answer = thinker.engine.post(PATH, input="Why?", max_output_tokens=0)
    assert (status, answer["error"]["param"]) == (400, "max_output_tokens")
