"""The library on the real pair, from prompt to text, through all processes."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import ssd
from ssd import LLM, SamplingParams
from ssd.client import AsyncClient, Client, Completion
from ssd.config.params import Mode, Speculation
from ssd.errors import RequestError, RequestTimeoutError, UsageError
from ssd.ipc.public import ChatMessage
from ssd.launch.options import EngineOptions
from ssd.models.pull import BUILTIN
from tests.scripted_engine import PATIENCE_S, SMALL

PROMPTS = ["def fibonacci(n):", "The capital of France is", "1, 2, 3, 4, 5,", "Q: What is 7 times 8?\nA:"]
CHATS = ["Why is the sky blue?", "Tom has 3 boxes of 12 pens. How many pens?", "What is a prime number?", "Say hello."]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mode": "fast"}, "^mode 'fast': there are ar, auto, ngram, sd, ssd$"),
        ({"dtype": "int3"}, "^dtype 'int3': there are bfloat16, float16, float32$"),
        ({"sampler": 3}, "^sampler 3: there are coupled, rejection$"),
        ({"num_speculative_tokens": 99}, "^num_speculative_tokens 99: expected int <= 16$"),
        ({"device": 5}, "^device 5: expected str, got int$"),
    ],
)
def test_a_wrong_argument_is_told_with_the_choices(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        LLM(**given)


def test_a_wrong_parameter_is_told_with_the_choices(llm: LLM) -> None:
    for params, words in (
        (
            SamplingParams(speculation=Speculation("fast", 4, (3,), "jit")),
            "^mode 'fast': there are ar, auto, ngram, sd, ssd$",
        ),  # type: ignore[arg-type]
        (SamplingParams(logit_bias={-1: 1.0}), r"^logit_bias \{-1: 1.0\}: expected int >= 0$"),
        (SamplingParams(top_p=2.0), "^top_p 2.0: expected float <= 1.0$"),
        (SamplingParams(stop=("",)), r"^stop \('',\): expected str of length >= 1$"),
    ):
        with pytest.raises(RequestError, match=words):
            llm.generate("hello", params)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_num_seqs=4) as llm:
        yield llm


def params(mode: Mode, temperature: float, tokens: int = 48, **speculation: object) -> list[SamplingParams]:
    asked = {"num_speculative_tokens": 4, "fan_out": (3,), "backup": "jit"} | speculation
    return [
        SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=tokens,
            ignore_eos=True,
            speculation=Speculation(mode, **asked),  # type: ignore[arg-type]
        )
        for seed in range(len(PROMPTS))
    ]


def assert_every_mode_says_the_same(llm: LLM, temperature: float, batched: bool) -> None:
    def ids(mode: Mode, **speculation: object) -> list[list[int]]:
        asked = params(mode, temperature, 32, **speculation)
        if batched:
            return [completion.token_ids for completion in llm.generate(PROMPTS, asked)]
        return [llm.generate([p], [a])[0].token_ids for p, a in zip(PROMPTS[:2], asked, strict=False)]

    expected = ids("ar")
    assert {len(answer) for answer in expected} == {32}
    assert ids("sd") == expected
    assert ids("ssd") == expected
    assert ids("ssd", num_speculative_tokens=2, fan_out=(4, 2, 5), backup="none") == expected
    assert ids("ssd", num_speculative_tokens=3, allocation="pearl", backup="none") == expected


def accepted_per_round(llm: LLM, temperature: float) -> float:
    """Of chats in `sd`, where the target waits: how much the draft is worth is then no matter of the clock."""
    metrics = [c.metrics for c in llm.generate(CHATS, params("sd", temperature), chat=True)]
    return sum(m.accepted_tokens for m in metrics) / sum(m.rounds for m in metrics)


@pytest.mark.parametrize(("temperature", "batched"), [(0.0, False), (0.8, True)])
def test_every_mode_says_the_same(llm: LLM, temperature: float, batched: bool) -> None:
    assert_every_mode_says_the_same(llm, temperature, batched)


def test_embeddings(llm: LLM) -> None:
    """Whatever else the parameters say; over ZeroMQ the vector is not scaled."""
    first, second = llm.embed([PROMPTS[0], PROMPTS[1]])
    assert len(first) == 576 and first != second
    assert sum(number * number for number in first) == pytest.approx(1.0, abs=1e-6)
    assert llm.embed(PROMPTS[0], "mean") == [first] != llm.embed(PROMPTS[0], "last")
    asked = SamplingParams(pooling="auto", logprobs=2, min_tokens=3, prompt_logprobs=1, speculation=Speculation("sd"))
    (completion,) = llm.generate(PROMPTS[0], asked)
    assert completion.embedding is not None
    assert (completion.token_ids, completion.usage.completion_tokens, completion.metrics.mode) == ([], 0, "ar")
    length = sum(number * number for number in completion.embedding) ** 0.5
    assert [number / length for number in completion.embedding] == pytest.approx(first)


def test_weights_in_8_bits_say_the_same_in_every_mode_and_the_draft_is_still_good() -> None:
    with LLM(max_num_seqs=4, quantize="int8") as llm:
        assert_every_mode_says_the_same(llm, 0.0, batched=True)
        assert_every_mode_says_the_same(llm, 0.8, batched=False)
        assert accepted_per_round(llm, 0.0) > 0.35


@pytest.mark.thorough
def test_a_cascade_says_the_same() -> None:
    """What a cascade is good for is asserted without a clock, in tests/draft/test_cascade.py: on a busy machine its
    drafts are left alone, even with settings of its own, which the tuner does not change."""
    temperature = 0.8
    with LLM("smollm2", ["smollm2-draft", "smollm2-draft"], max_num_seqs=4) as cascade:
        expected = [completion.token_ids for completion in cascade.generate(PROMPTS, params("ar", temperature))]
        for mode in ("sd", "ssd"):
            asked = params(mode, temperature, num_speculative_tokens=4, fan_out=(3,), backup="jit")
            assert [completion.token_ids for completion in cascade.generate(PROMPTS, asked)] == expected


def test_speculation_hits_and_is_accepted(llm: LLM) -> None:
    """How often is a matter of the clock in `ssd`: on a busy machine the draft is late, or left alone. A broken cache
    or a wrong draft hits about as often as chance, 3 in 49,152."""
    completions = llm.generate(PROMPTS, params("ssd", 0.0))
    assert sum(c.metrics.hits for c in completions) > 0
    assert sum(c.metrics.accepted_tokens for c in completions) > 0


def test_chat_answers_and_counts(llm: LLM) -> None:
    (completion,) = llm.generate("What is the capital of France?", SamplingParams(max_tokens=64), chat=True)
    assert "Paris" in completion.text
    assert completion.finish_reason == "stop"
    assert completion.usage.prompt_tokens == len(completion.prompt_token_ids)
    assert completion.usage.completion_tokens == len(completion.token_ids)
    assert completion.metrics.rounds * completion.metrics.mean_acceptance_length == pytest.approx(
        len(completion.token_ids) - 1, abs=completion.metrics.mean_acceptance_length
    )


def test_a_chat_is_one_conversation_or_several(llm: LLM) -> None:
    """Of dicts or of messages, as `generate` answers a text with `chat`; a system message changes the prompt."""
    short, (sky, pens, *_) = SamplingParams(max_tokens=8), CHATS
    said = [llm.generate(text, short, chat=True)[0] for text in (sky, pens)]
    single = llm.chat([{"role": "user", "content": sky}], short)
    both = llm.chat([[ChatMessage("user", sky)], [{"role": "user", "content": pens}]], [short, short])
    assert [one.token_ids for one in single] == [said[0].token_ids]
    assert [one.token_ids for one in both] == [one.token_ids for one in said]
    (told,) = llm.chat([{"role": "system", "content": "Speak French."}, {"role": "user", "content": sky}], short)
    assert told.usage.prompt_tokens != said[0].usage.prompt_tokens


@pytest.mark.parametrize("messages", [[{"role": "cook", "content": "x"}], [{"content": "x"}], [["x"]]], ids=str)
def test_what_is_no_chat_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(UsageError, match="a message of a chat has a role and a content"):
        llm.chat(messages)
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.chat([])


def test_a_stream_gives_the_pieces_of_what_generate_gives(llm: LLM) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    (whole,) = llm.generate(PROMPTS[0], params)
    for prompt in (PROMPTS[0], whole.prompt_token_ids):
        chunks = list(llm.stream(prompt, params))
        assert len(chunks) > 2 and [chunk.completion for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
        assert (last := chunks[-1].completion) is not None and last.token_ids == whole.token_ids
    *_, last_chunk = llm.stream([{"role": "user", "content": CHATS[0]}], params)
    (answer,) = llm.generate(CHATS[0], params, chat=True)
    assert last_chunk.completion is not None and last_chunk.completion.token_ids == answer.token_ids


def test_other_calls_may_come_between_the_pieces_of_a_stream(llm: LLM) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    (whole,) = llm.generate(PROMPTS[0], params)
    stream, found = llm.stream(PROMPTS[0], params), []
    for chunk in stream:
        found += chunk.token_ids
        llm.generate(PROMPTS[1], SamplingParams(max_tokens=2))
    assert found == whole.token_ids
    begun = llm.stream(PROMPTS[0], SamplingParams(max_tokens=1000, ignore_eos=True))
    next(begun)
    begun.close()
    assert llm.generate(PROMPTS[0], params)[0].token_ids == whole.token_ids


def test_every_engine_option_is_an_argument_with_the_same_default() -> None:
    arguments = inspect.signature(LLM).parameters
    assert set(arguments) == set(EngineOptions.__struct_fields__)
    otherwise = {"draft": None, "num_speculative_tokens": "auto", "fan_out": "auto"}
    expected = {name: getattr(EngineOptions(), name) for name in arguments} | otherwise
    assert {name: argument.default for name, argument in arguments.items()} == expected
    assert all(f"`{name}`" in str(LLM.__doc__) for name in arguments)
    with pytest.raises(TypeError, match="max_seqs"):
        LLM(max_seqs=4)  # type: ignore[call-arg]


@pytest.mark.parametrize("method", ["generate", "chat", "stream", "get_default_sampling_params"])
def test_an_llm_and_both_clients_take_the_same_arguments(method: str) -> None:
    takes, *others = (
        [(each.name, each.kind, each.default) for each in inspect.signature(getattr(kind, method)).parameters.values()]
        for kind in (LLM, Client, AsyncClient)
    )
    assert others == [takes, takes]


def test_an_llm_says_what_it_is_and_samples_as_its_model_says() -> None:
    with LLM(**SMALL, max_num_seqs=1) as llm:
        assert repr(llm) == "<LLM 'small', mode 'ar'>"
        asked = llm.get_default_sampling_params(max_tokens=4, ignore_eos=True)
        assert (asked.temperature, asked.max_tokens, asked.plain) == (0.0, 4, False)
        assert len(llm.generate("a", asked)[0].token_ids) == 4
        with pytest.raises(RequestTimeoutError):
            llm.generate("a", asked, timeout=0.0)
    assert repr(llm) == "<LLM 'small', mode 'ar', closed>"
    with LLM(**SMALL, max_num_seqs=1, generation_config="none") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_what_a_program_names_is_at_the_top() -> None:
    assert {name: getattr(ssd, name) for name in ssd.__all__} == {
        "LLM": LLM,
        "Completion": Completion,
        "RequestError": RequestError,
        "SamplingParams": SamplingParams,
        "__version__": ssd.__version__,
    }


def test_models_may_be_paths_and_threads_take_turns() -> None:
    """Several threads in one connection at once would take each other's messages, and wait for ever."""
    params, prompts = SamplingParams(max_tokens=8, seed=1), [f"text {number}" for number in range(8)]
    with LLM(BUILTIN["smollm2"].directory, BUILTIN["smollm2-draft"].directory, mode="sd") as llm:
        expected = [llm.generate([prompt] * 3, params) for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as pool:
            found = list(pool.map(lambda prompt: llm.generate([prompt] * 3, params), prompts))
    assert [[one.token_ids for one in batch] for batch in found] == [
        [one.token_ids for one in batch] for batch in expected
    ]


def test_a_refused_prompt_leaves_the_engine_alone(llm: LLM) -> None:
    with pytest.raises(RequestError, match="the context of 8192 tokens"):
        llm.generate("word " * 10_000)
    assert llm.generate("The capital of France is", SamplingParams(max_tokens=4))[0].token_ids


@pytest.mark.parametrize(("temperature", "floor"), [(0.0, 0.35), (1.0, 0.25)])
def test_the_shipped_draft_is_worth_shipping(llm: LLM, temperature: float, floor: float) -> None:
    """Accepted tokens per round in chat format: a broken draft cache or a wrong file has next to none."""
    assert accepted_per_round(llm, temperature) > floor


def test_the_ratio_rule_on_the_real_pair() -> None:
    """Laws cross between the processes: drawn tokens are accepted, more often than by chance, and texts end in one
    piece. An engine that was started without the rule refuses it."""
    options = {"num_speculative_tokens": 2, "fan_out": (3,), "sampler": "rejection", "saguaro_c": 0.8}
    with LLM(mode="ssd", max_num_seqs=4, **options) as llm:
        for mode in ("sd", "ssd"):
            deadline, metrics = time.monotonic() + PATIENCE_S, []
            # On a busy machine the draft may be late, or left alone.
            while sum(m.drafted_tokens for m in metrics) < 50 or (mode == "ssd" and not any(m.hits for m in metrics)):
                assert time.monotonic() < deadline, f"no draft in mode {mode}"
                completions = llm.generate(CHATS, params(mode, 1.0, 32, **options), chat=True)
                metrics += [completion.metrics for completion in completions]
                assert all(len(completion.token_ids) == 32 for completion in completions)
            assert sum(m.accepted_tokens for m in metrics) / sum(m.drafted_tokens for m in metrics) > 0.12


def test_the_ratio_rule_must_be_asked_for_at_the_start(llm: LLM) -> None:
    drawn = SamplingParams(
        temperature=1.0,
        max_tokens=4,
        speculation=Speculation(sampler="rejection", num_speculative_tokens=4, fan_out=(3,), backup="jit"),
    )
    with pytest.raises(RequestError, match="start it with --sampler rejection"):
        llm.generate("hello", drawn)
