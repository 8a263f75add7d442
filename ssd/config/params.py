"""The parameters of one request, for client library, frontend and target."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, inspect

from ssd.config.descriptions import MAIN, SAMPLING
from ssd.errors import RequestError
from ssd.law import MAX_SEED, DrawDefaults, DrawParams, Seed, Share, Temperature
from ssd.speculation.fan_out import MOST
from ssd.speculation.rules import AcceptanceRule, acceptance_rule

Mode = Literal["auto", "ar", "ngram", "sd", "ssd"]
DRAFTED: tuple[Mode, ...] = ("sd", "ssd")
"""Modes that need a draft model."""
Backup = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]
Sampler = Literal["coupled", "rejection"]
Allocation = Literal["joint", "theorem", "pearl"]

MAX_LOOKAHEAD = 16
TARGET_REACH, DRAFT_REACH = 2 * (MAX_LOOKAHEAD + 1), 4 * (MAX_LOOKAHEAD + 1)
"""Tokens in a row whose changes are kept for a sequence, where layers have states.

A target keeps the changes of the present row, and of the row before it until they are in the state. A draft keeps the
changes of its trunk, and of the chain that became the trunk until its accepted tokens are in the state."""
MAX_FAN_OUT = MOST
MAX_CHAINS = 63
MAX_IN_FLIGHT = 48
"""Upper bound on the trunk of a draft on another machine, without the tokens that chains add to it."""
AUTO_LOOKAHEAD = 8
MAX_STOPS = 64

Lookahead = Annotated[int, Meta(ge=0, le=MAX_LOOKAHEAD)]
Budget = Annotated[int, Meta(ge=2, le=MAX_CHAINS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=100)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
CacheSalt = Annotated[str, Meta(max_length=512)]
Scope = tuple[str, str]
"""The client's key or its name, and `cache_salt`: only requests of one scope share what could tell by its time."""
FanOut = Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_FAN_OUT)], ...], Meta(max_length=MAX_LOOKAHEAD + 1)]

Pooling = Literal["auto", "last", "mean"]
GrammarKind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag", "compiled"]
MAX_GRAMMAR = 256 * 2**10
"""Most characters of a client's grammar; the engine's limits may be lower."""
MAX_COMPILED = 4 * MAX_GRAMMAR

FanOutName = Literal["theorem", "pearl"]
FanOutChoice = FanOut | FanOutName
"""The value of the option: numbers, () for a joint allocation, lists by Theorem 12, or PEARL's single chain."""


def fan_out_fields(asked: FanOutChoice) -> dict[str, Any]:
    """Return the fields of `Speculation` that the option sets."""
    if isinstance(asked, str):
        return {"fan_out": (), "allocation": asked}
    return {"fan_out": asked, "allocation": "joint"}


def field_types(options: type[msgspec.Struct]) -> dict[str, inspect.Type]:
    return {field.name: field.type for field in inspect.type_info(options).fields}  # type: ignore[attr-defined]


def in_words(error: msgspec.ValidationError, values: msgspec.Struct) -> str:
    """Return an error for people: the field of `values`, its value, the cause or the choices."""
    cause, _, path = str(error).partition(" - at `")
    names = re.findall(r"\w+", path.rpartition("$")[2])
    if not names:
        return cause
    while len(names) > 1 and isinstance(inner := getattr(values, names[0]), msgspec.Struct):
        values = inner
        del names[0]
    name = names[0]
    types: Mapping[str, Any] = field_types(type(values))
    parts = types[name].types if isinstance(types.get(name), inspect.UnionType) else (types.get(name),)
    choices = [part.values for part in parts if isinstance(part, inspect.LiteralType)]
    if len(choices) == 1 and len(choices) == sum(not isinstance(part, inspect.NoneType) for part in parts):
        cause = f"there are {', '.join(map(str, choices[0]))}"
    return f"{name} {getattr(values, name, None)!r:.60}: {cause.replace('`', '').replace('Expected', 'expected')}"


class Speculation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The speculation of one request. It changes the speed, never the distribution of the tokens.

    With the sampler `coupled`, or at temperature 0, no token changes either. `num_speculative_tokens` is K; `fan_out`
    one number for every accepted length, or F_0..F_K. The engine chooses K = 0 and an empty `fan_out` while it runs,
    with at most `budget` chains: `joint` gives them to the likeliest outcomes of all accepted lengths, `theorem` to
    each length its share (Theorem 12), `pearl` one to full acceptance (arXiv 2408.11850). `backup` is auto, jit, none
    or a speculator (`ssd.speculation.backups`). `saguaro_c` is the C of Saguaro sampling, for `rejection`; 1: off."""

    mode: Mode = "auto"
    num_speculative_tokens: Lookahead = 0
    fan_out: FanOut = ()
    backup: Backup = "auto"
    sampler: Sampler = "coupled"
    saguaro_c: Share = 1.0
    budget: Budget = 32
    allocation: Allocation = "joint"

    def check(self) -> None:
        """Raise RequestError where the fields contradict each other."""
        if (cause := self._contradiction()) is not None:
            raise RequestError("invalid_request", cause, "speculation")

    def _contradiction(self) -> str | None:
        wanted = self.num_speculative_tokens + 1
        if wanted == 1 and len(self.fan_out) > 1:
            return "a list of fan-outs has K + 1 numbers: give -k a number, not auto"
        if self.fan_out and not any(self.fan_out):
            return "a fan-out of 0 prepares no outcome: mode sd drafts without preparing any"
        if not self.fan_out and self.allocation != "pearl" and self.budget < wanted:
            return f"a budget of {self.budget} is less than one chain for each of {wanted}"
        if len(self.fan_out) not in (0, 1, wanted):
            return f"fan-out lists {len(self.fan_out)} numbers; give one, or K + 1 = {wanted} (one per accepted length)"
        if self.chains > MAX_CHAINS:
            return f"fan-out asks for {self.chains} outcomes per round; at most {MAX_CHAINS} are prepared"
        if self.saguaro_c != 1.0 and not self.rule().needs_draft_probs:
            return "saguaro-c is for samplers with draft probabilities, as rejection"
        return None

    @property
    def fan_out_choice(self) -> FanOutChoice:
        return self.fan_out if self.fan_out or self.allocation == "joint" else self.allocation

    @property
    def auto(self) -> bool:
        """Return True if mode, K or fan-out is chosen while the engine runs."""
        return self.mode == "auto" or (self.mode in DRAFTED and not (self.num_speculative_tokens and self.fan_out))

    def rule(self, temperature: float = 1.0) -> AcceptanceRule:
        """Return the acceptance rule at a temperature; by default above 0, where a rule needs most."""
        return acceptance_rule(self.sampler, temperature)

    @property
    def longest(self) -> int:
        """Return the largest K that may be chosen."""
        return self.num_speculative_tokens or AUTO_LOOKAHEAD

    @property
    def chains(self) -> int:
        """Return the largest B = F_0 + ... + F_K that may be chosen."""
        if not self.fan_out:
            return 1 if self.allocation == "pearl" else self.budget
        return self.fan_out[0] * (self.longest + 1) if len(self.fan_out) == 1 else sum(self.fan_out)


class Structured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The required form of the output: `source`, in the language of `kind`.

    `json`: a JSON Schema. `json_object`: no source. `choice`: a JSON array of strings. `grammar`: Lark or GBNF.
    `structural_tag`: vLLM's `structures` and `triggers`. `compiled`: the frontend's, for `llguidance`."""

    kind: GrammarKind
    source: Annotated[str, Meta(max_length=MAX_COMPILED)] = ""


class SamplingParams(DrawParams, frozen=True):
    """The sampling of tokens and the end of the output. Names and meaning follow the OpenAI API and vLLM.

    - `temperature` 0 is greedy; ties go to the lowest id.
    - The penalties count tokens of the output, `repetition_penalty` those of the prompt too.
    - The output ends when `structured` is complete, even before `min_tokens` and with `ignore_eos`. Nothing else ends
      it before `min_tokens`, unless all `allowed_token_ids` do.
    - `logprobs` n: of each token under the target's unmodified distribution, and of the n likeliest alternatives.
      `prompt_logprobs`: the same for the prompt but its first token.
    - Only the last `truncate_prompt_tokens` tokens of a prompt are used.
    - With `pooling` the result is an embedding, the mean or the last of the target's last hidden states over the
      prompt; `auto` is as the checkpoint says.
    - Only prompts with the same `cache_salt` share prefixes in the cache.
    - With `store` false the suffix memory neither keeps the text nor guesses from others."""

    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] = (
        msgspec.field(default_factory=dict)
    )
    allowed_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=1024)] = ()
    structured: Structured | None = None
    seed: Seed | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 128
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    stop: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(max_length=MAX_STOPS)] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=64)] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    speculation: Speculation | None = None
    cache_salt: CacheSalt = ""
    store: bool = True
    truncate_prompt_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    pooling: Pooling | None = None

    def check(self) -> None:
        """Raise RequestError for values that a decoder would refuse; a constructor checks nothing."""
        if self.temperature != self.temperature:  # not math.isnan, which raises TypeError for other types
            raise RequestError("invalid_request", "temperature is not a number")
        try:
            msgspec.convert(msgspec.to_builtins(self), SamplingParams)
        except msgspec.ValidationError as error:
            raise RequestError("invalid_request", in_words(error, self)) from None
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                "invalid_request",
                f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}",
                "min_tokens",
            )
        if self.speculation is not None:
            self.speculation.check()

    @property
    def plain(self) -> bool:
        """Return True if the model's logits are used unchanged."""
        neutral = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) == (0.0, 0.0, 1.0)
        free = not self.logit_bias and not self.allowed_token_ids and self.structured is None
        return neutral and free and not self.min_tokens


class SamplingDefaults(DrawDefaults, frozen=True):
    """The default sampling of requests; None keeps the default of `SamplingParams`."""

    heading: ClassVar[str] = SAMPLING
    temperature: Annotated[Temperature | None, "0 is greedy. Default: the model's own, or 0.", MAIN] = None
    presence_penalty: Annotated[Penalty | None, "Lowers logits of tokens in the answer. Default: the model's."] = None
    frequency_penalty: Annotated[Penalty | None, "The same, for each time they are there. Default: the model's."] = None
    repetition_penalty: Annotated[
        RepetitionPenalty | None, "Divides logits of tokens in prompt and answer; 1: off. Default: the model's."
    ] = None

    def given(self) -> dict[str, float]:
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

    def params(self, *, free_text: bool = False, **asked: Any) -> SamplingParams:
        """Return the parameters `asked` for, with these defaults where they are None or left out.

        With a grammar no default penalty holds: an answer repeats facts of its prompt. If the grammar allows
        `free_text`, which may loop, penalties on the answer's own tokens stay."""
        wanted = {name: value for name, value in asked.items() if value is not None}
        own = self.given()
        if "structured" in wanted:
            dropped = {"repetition_penalty"} if free_text else {name for name in own if name.endswith("_penalty")}
            own = {name: value for name, value in own.items() if name not in dropped}
        return SamplingParams(**own | wanted)


def derived_seed(seed: int, index: int) -> int:
    """Return the seed of a request's choice `index`: `seed` for the first; the others do not reveal it."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(b"%d/%d" % (seed, index), digest_size=8).digest()
    return int.from_bytes(digest) & MAX_SEED
