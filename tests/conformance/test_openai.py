"""The `openai` client against the built-in pair."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import openai
import pytest

from tests.conformance.conftest import launched

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture
def client(server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)


def test_the_example_streams_a_chat(server: str) -> None:
    example = Path(__file__).parent.parent.parent / "examples" / "openai_client.py"
    done = subprocess.run([sys.executable, str(example), server], capture_output=True, text=True)
    assert done.returncode == 0 and "guessed by the draft" in done.stdout, done.stderr[-4000:]


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == "smollm2"
    assert client.models.retrieve("smollm2").id == "smollm2"


def test_a_chat_is_the_same_streamed_or_not(client: openai.OpenAI) -> None:
    given = {"model": "smollm2", "messages": MESSAGES, "max_tokens": 24, "temperature": 0.8, "seed": 3}
    whole = client.chat.completions.create(**given)
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage is not None and whole.usage.completion_tokens <= 24
    chunks = list(client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    details = whole.usage.completion_tokens_details
    assert details is not None and details.accepted_prediction_tokens is not None


def test_a_conversation_goes_on_with_the_answer_as_the_client_has_it(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="smollm2", messages=MESSAGES, max_tokens=8)
    history = [*MESSAGES, first.choices[0].message, {"role": "user", "content": "And two more."}]
    second = client.chat.completions.create(model="smollm2", messages=history, max_tokens=8)  # type: ignore[arg-type]
    assert second.choices[0].message.content


def test_completions_with_choices_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="smollm2", prompt=["The sky is", "Grass is"], n=2, max_tokens=6, temperature=1.0, seed=1, logprobs=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
    assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 6
    assert answer.choices[0].text != answer.choices[1].text


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=2, temperature=0
    )
    content = answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert content
    assert all(entry.logprob == max(top.logprob for top in entry.top_logprobs) for entry in content)


def test_embeddings(client: openai.OpenAI) -> None:
    """The client asks for base64 unless told otherwise, and decodes it."""
    texts = ["The sky is blue.", "Grass is green.", "The sky is blue."]
    answer = client.embeddings.create(model="smollm2", input=texts)
    first, second, third = (entry.embedding for entry in answer.data)
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    assert first == third != second and len(first) == 576
    assert sum(number * number for number in first) == pytest.approx(1.0, abs=1e-5)
    plain = client.embeddings.create(model="smollm2", input=texts[0], encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(first, rel=1e-6)
    short = client.embeddings.create(model="smollm2", input=[[1, 2, 3]], dimensions=64)
    assert len(short.data[0].embedding) == 64 and short.usage.total_tokens == 3
    with pytest.raises(openai.BadRequestError, match="empty"):
        client.embeddings.create(model="smollm2", input="")


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="smollm2", messages=MESSAGES, modalities=["audio"])
    assert caught.value.param == "modalities"
    with pytest.raises(openai.BadRequestError, match=r"cannot hold it|the context of"):
        client.completions.create(model="smollm2", prompt="a " * 9000)


def test_leaving_a_stream_frees_its_place(client: openai.OpenAI) -> None:
    for _ in range(12):  # more than run at once
        stream = client.completions.create(model="smollm2", prompt="On and on", max_tokens=1000, stream=True)
        next(iter(stream))
        stream.close()
    assert client.completions.create(model="smollm2", prompt="Now", max_tokens=2).usage


def test_many_at_once_from_one_client(server: str) -> None:
    async def main() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none")
        answers = await asyncio.gather(
            *[
                client.completions.create(model="smollm2", prompt="Again", max_tokens=6, temperature=0)
                for _ in range(12)
            ]
        )
        return [answer.choices[0].text for answer in answers]

    assert len(set(asyncio.run(main()))) == 1


@pytest.mark.mock
def test_keys_and_retries() -> None:
    options = ("--load-format", "mock", "--max-open-requests", "1")
    with launched(*options, SSD_MOCK_ROUND_MS="20", SSD_API_KEY="sesame") as url:
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="sesame", max_retries=0)
        name = next(iter(client.models.list())).id
        held = client.completions.create(model=name, prompt="a", max_tokens=2000, stream=True)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model=name, prompt="a")
        threading.Timer(0.5, held.close).start()
        patient = client.with_options(max_retries=8)
        assert patient.completions.create(model=name, prompt="a", max_tokens=2).choices
