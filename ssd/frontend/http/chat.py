"""`/v1/chat/completions`: its requests to the engine, and its JSON. A wrong field raises HttpError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET

from ssd.config.engine import EngineConfig
from ssd.frontend.http import answers
from ssd.frontend.http.asked import AskedAnswer, new_id, numbered_id
from ssd.frontend.http.bodies import NO_FUNCTION, ChatRequest, Said, SaidCall, TokenizeRequest, Tool
from ssd.frontend.http.errors import invalid, missing
from ssd.frontend.http.exchange import encoder
from ssd.frontend.http.parameters import count, each_choice, most_tokens, sampling
from ssd.frontend.http.style import Choice, Each, ParsingStyle
from ssd.frontend.output_collector import Part
from ssd.frontend.parsers.answer import joined
from ssd.ipc.public import (
    MAX_CALLS,
    MAX_TEMPLATE_KWARGS,
    MAX_TEXT,
    MAX_TOOLS,
    CalledTool,
    ChatMessage,
    ChatOptions,
    Chunk,
    Done,
    Generate,
    TokenLogprob,
)

_ROLES = {"developer": "system", "function": "tool"}


def conversation(messages: Sequence[Said]) -> list[ChatMessage]:
    """Convert messages to those of the engine, with one text each, and only its roles.

    A result without an id is that of the next call of the last message with calls, of its tool if it has a name."""
    calls = _calls(messages)
    tools = {call.id: call.name for made in calls for call in made}
    open: list[CalledTool] = []
    found = []
    for index, (said, made) in enumerate(zip(messages, calls, strict=True)):
        content, returns = said.content, said.role in ("tool", "function")
        if content is None and said.role != "assistant":
            raise missing(f"messages[{index}].content")
        call_id = said.tool_call_id or ""
        open = [*made] or open  # at most `MAX_CALLS`
        if returns:
            fits = [call for call in open if call_id in ("", call.id) and (call_id or said.name in (None, call.name))]
            open = [call for call in open if call not in fits[:1]]
            call_id = fits[0].id if fits else call_id
        parts = [content] if isinstance(content, str) else content or ()
        text = "".join(part if isinstance(part, str) else part.text for part in parts)
        if max(len(text), len(said.reasoning_content or "")) > MAX_TEXT:
            raise invalid("messages", f"a message has more than {MAX_TEXT} characters")
        found.append(
            ChatMessage(
                _ROLES.get(said.role, said.role),  # type: ignore[arg-type]
                text,
                made,
                call_id,
                (said.name or tools.get(call_id, "")) if returns else "",
                said.reasoning_content or "",
            )
        )
    return found


def _calls(messages: Sequence[Said]) -> list[list[CalledTool]]:
    """Return the calls of each message, and number those without an id."""
    calls, count = [], 0
    for index, said in enumerate(messages):
        calls.append(made := list[CalledTool]())
        older = [] if said.function_call is None else [SaidCall(function=said.function_call)]
        for number, call in enumerate([*(said.tool_calls or ()), *older]):
            if call.function is NO_FUNCTION:
                raise missing(f"messages[{index}].tool_calls[{number}].function")
            text = call.function.arguments
            text = text if isinstance(text, str) else encoder.encode(text or {}).decode()
            made.append(CalledTool(call.id or numbered_id(count), call.function.name, text))
            count += 1
        if len(made) > MAX_CALLS:
            raise invalid("messages", f"a message has {len(made)} calls of tools; at most {MAX_CALLS} are taken")
    return calls


def options(body: ChatRequest | TokenizeRequest, tools: Sequence[Tool]) -> ChatOptions:
    continues, begins = bool(body.continue_final_message), body.add_generation_prompt
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    kwargs = encoder.encode({**effort, **(body.chat_template_kwargs or {})})
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        raise invalid("chat_template_kwargs", f"chat_template_kwargs has more than {MAX_TEMPLATE_KWARGS} bytes")
    shown = encoder.encode(tools).decode()
    if len(shown) > MAX_TOOLS:
        raise invalid("tools", f"tools has more than {MAX_TOOLS} characters")
    return ChatOptions(not continues if begins is None else begins, continues, kwargs.decode(), shown)


def generates(body: ChatRequest, config: EngineConfig, asked: AskedAnswer) -> list[Generate]:
    n = count(body, config)
    if body.return_origins and not body.stream:
        raise invalid("return_origins", "return_origins needs stream")
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs")
    older = body.max_tokens if body.max_completion_tokens is None else None
    names = {"max_completion_tokens": body.max_completion_tokens, "max_tokens": older, "n_predict": body.n_predict}
    limit = most_tokens(config, config.max_model_len, **names)
    if limit == 0:
        name = next(name for name, value in names.items() if value == 0)
        raise invalid(name, f"{name} must be at least 1, or -1")
    params = sampling(
        body,
        config,
        structured=asked.structured or asked.form.structured,  # the calls' grammar holds the form
        free_text=asked.obey is not None,
        max_tokens=limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    messages = conversation(body.messages)
    chat = options(body, asked.tools)
    return [
        Generate(index, messages=messages, params=own, chat=chat) for index, own in enumerate(each_choice(params, n))
    ]


class ChatStyle(ParsingStyle):
    prompt = "messages"
    prefix = "chatcmpl-"

    def __init__(self, body: ChatRequest, *given: Any) -> None:
        super().__init__(body, *given)
        self._with_logprobs, self.by_origin = bool(body.logprobs), bool(body.return_origins)

    async def whole(self, choices: Sequence[Choice], each: Each) -> answers.Chat:
        return answers.Chat(
            object="chat.completion",
            choices=[await self._choice(choice, each) for choice in choices],
            usage=self._usage(choices),
            metrics=self._metrics(choices),
            prompt_logprobs=await self._prompt_logprobs(choices[0], each),
            **self._named,
        )

    def first(self, choice: Choice) -> list[answers.ChatChunk]:
        return [self._chunk(choice, answers.Delta("assistant", ""))]

    def events(self, choice: Choice, message: Chunk | Done) -> list[answers.ChatChunk]:
        deltas = self._deltas(choice, message)
        if isinstance(message, Done):
            before = [self._chunk(choice, delta) for delta in deltas[:-1]]
            return [*before, self._chunk(choice, deltas[-1], reason=self._reason(choice))]
        ids = message.token_ids if self._with_ids else UNSET
        origin = message.origin if isinstance(message, Part) else UNSET
        begun = self._chunk(choice, deltas[0], self._of_content(choice, message.logprobs), token_ids=ids, origin=origin)
        return [begun, *(self._chunk(choice, delta, origin=origin) for delta in deltas[1:])]

    def _deltas(self, choice: Choice, message: Chunk | Done) -> list[answers.Delta]:
        # Some clients read only one of a delta: its content or one call.
        if choice.parser is None:
            return [answers.Delta(content=message.text if message.text or isinstance(message, Chunk) else UNSET)]
        news, made = choice.parts[-1], choice.parts[-1].calls
        first = choice.calls - len(made)
        calls = [
            answers.DeltaCall(new_id(), answers.Called(*call), index=index) for index, call in enumerate(made, first)
        ]
        found = [answers.Delta(reasoning_content=news.reasoning)] if news.reasoning else []
        found += [answers.Delta(content=news.content)] if news.content else []
        if self._asked.legacy:
            found += [answers.Delta(function_call=call.function) for call in calls]
        else:
            found += [answers.Delta(tool_calls=[call]) for call in calls]
        return found or [answers.Delta()]

    def _message(self, choice: Choice) -> answers.AssistantMessage:
        if choice.parser is None:
            return answers.AssistantMessage("assistant", "".join(choice.text))
        answer = joined(choice.parts)
        calls = [answers.MessageCall(new_id(), answers.Called(*call)) for call in answer.calls]
        silent = not answer.content and (calls or answer.reasoning)
        return answers.AssistantMessage(
            "assistant",
            None if silent else answer.content,
            reasoning_content=answer.reasoning or UNSET,
            tool_calls=UNSET if self._asked.legacy else calls or UNSET,
            function_call=calls[0].function if calls and self._asked.legacy else UNSET,
        )

    async def _choice(self, choice: Choice, each: Each) -> answers.ChatChoice:
        entries = self._of_content(choice, choice.logprobs)
        logprobs = await each(self._content_logprob, entries) if self._with_logprobs and entries is not None else None
        return answers.ChatChoice(
            choice.index,
            self._message(choice),
            None if logprobs is None else answers.ChatLogprobs(logprobs),
            self._reason(choice),
            choice.token_ids if self._with_ids else UNSET,
            choice.request.prompt.tolist() if self._with_ids else UNSET,
        )

    def _reason(self, choice: Choice) -> answers.ChatFinishReason:
        reason = choice.end.finish_reason
        if not choice.calls or reason != "stop" or self._asked.named:
            return reason
        return "function_call" if self._asked.legacy else "tool_calls"

    def _chunk(
        self,
        choice: Choice,
        delta: answers.Delta,
        logprobs: list[TokenLogprob] | None = None,
        reason: answers.ChatFinishReason | None = None,
        **more: Any,
    ) -> answers.ChatChunk:
        shown = None
        if logprobs is not None:
            shown = answers.ChatLogprobs([self._content_logprob(entry) for entry in logprobs])
        return self._part(
            [answers.ChatChunkChoice(choice.index, delta, shown, reason, **more)],
            usage=self._event_usage(choice),
        )

    def _part(self, choices: list[answers.ChatChunkChoice], **more: Any) -> answers.ChatChunk:
        return answers.ChatChunk(object="chat.completion.chunk", choices=choices, **self._named, **more)

    def _of_content(self, choice: Choice, entries: list[TokenLogprob] | None) -> list[TokenLogprob] | None:
        ended = choice.request.stop_token and len(choice.token_ids) == choice.request.completion_tokens
        return entries[:-1] if entries and ended else entries

    def _content_logprob(self, entry: TokenLogprob) -> answers.ContentLogprob:
        piece, raw = self._vocabulary.piece, self._vocabulary.piece_bytes
        tops = [answers.TopLogprob(piece(token), value, list(raw(token))) for token, value in entry.top]
        return answers.ContentLogprob(piece(entry.token_id), entry.logprob, list(raw(entry.token_id)), tops)
