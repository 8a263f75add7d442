"""`/v1/responses` with the `openai` client: with the client's history, and with the server's."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.conformance.repeating import ANSWERS
from tests.conformance.test_tools import TOOLS

FLAT: list[Any] = [{"type": "function", **TOOLS[0]["function"], "strict": False}]
ASKED: dict[str, Any] = {"model": "caller", "temperature": 0, "tools": FLAT}
WEATHER = "How is the weather in Rome and Oslo?"


@pytest.fixture
def client(caller: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{caller}/v1", api_key="none", max_retries=0)


def kinds(output: Any) -> list[str]:
    return [item.type for item in output]


def test_an_agent_goes_on_with_the_items_it_got(client: openai.OpenAI) -> None:
    first = client.responses.create(input=WEATHER, instructions="Be brief.", **ASKED)
    assert first.status == "completed" and first.instructions == "Be brief."
    assert kinds(first.output) == ["reasoning", "message", "function_call", "function_call"]
    assert first.output_text == "Let me see."
    assert first.usage is not None and first.usage.output_tokens == len(ANSWERS["<assistant>"]) + 1
    calls = [item for item in first.output if item.type == "function_call"]
    assert [call.arguments for call in calls] == ['{"city": "Rome"}', '{"city": "Oslo"}']
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"} for call in calls]
    said: list[Any] = [{"role": "user", "content": WEATHER}, *first.output, *results]
    last = client.responses.create(input=said, **ASKED)
    assert last.output_text == "It is sunny." and kinds(last.output) == ["message"]


def test_a_stream_tells_each_item_from_its_beginning_to_its_end(client: openai.OpenAI) -> None:
    with client.responses.stream(input=WEATHER, **ASKED) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == sorted(
        event.sequence_number for event in events if hasattr(event, "sequence_number")
    )
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    assert kinds(final.output) == ["reasoning", "message", "function_call", "function_call"]
    assert final.output_text == "Let me see."
    for index, item in enumerate(final.output):
        of_item = [event for event in events if getattr(event, "output_index", None) == index]
        assert of_item[0].type == "response.output_item.added" and of_item[-1].type == "response.output_item.done"
        assert getattr(of_item[-1], "item", None) is not None and of_item[-1].item.id == item.id  # type: ignore[union-attr]


def test_a_limit_leaves_a_response_incomplete(client: openai.OpenAI) -> None:
    cut = client.responses.create(input=WEATHER, max_output_tokens=3, **ASKED)
    assert cut.status == "incomplete" and cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    with client.responses.stream(input=WEATHER, max_output_tokens=3, **ASKED) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"


def test_an_agent_goes_on_from_a_response(client: openai.OpenAI) -> None:
    first = client.responses.create(input=WEATHER, **ASKED)
    assert first.store is True
    calls = [item for item in first.output if item.type == "function_call"]
    results: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"} for call in calls
    ]
    counted = client.responses.input_tokens.count(
        model="caller", tools=FLAT, input=results, previous_response_id=first.id
    )
    last = client.responses.create(input=results, previous_response_id=first.id, **ASKED)
    assert last.output_text == "It is sunny." and last.previous_response_id == first.id
    assert last.usage is not None and counted.input_tokens == last.usage.input_tokens
    by_reference: list[Any] = [{"type": "item_reference", "id": item.id} for item in first.output]
    again = client.responses.create(input=[{"role": "user", "content": WEATHER}, *by_reference, *results], **ASKED)
    assert again.output_text == last.output_text and again.usage is not None
    assert again.usage.input_tokens == last.usage.input_tokens


def test_a_response_is_fetched_listed_and_deleted(client: openai.OpenAI) -> None:
    first = client.responses.create(input=WEATHER, **ASKED)
    found = client.responses.retrieve(first.id)
    assert found.to_dict() == first.to_dict()
    second = client.responses.create(input="And now?", previous_response_id=first.id, **ASKED)
    listed = [item.to_dict() for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
    assert len(listed) == len(first.output) + 2 and listed[1:-1] == [item.to_dict() for item in first.output]
    assert [item["content"][0]["text"] for item in (listed[0], listed[-1])] == [WEATHER, "And now?"]
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(first.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.retrieve(first.id)
    assert caught.value.code == "response_not_found"
