"""Every message survives the wire; whatever else arrives is a `BadFrame` and nothing worse."""

from __future__ import annotations

import importlib
import pickle
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.config.params import SamplingDefaults, SamplingParams, Speculation
from ssd.ipc import messages as m
from ssd.ipc import public as p
from ssd.law import MAX_SEED, Law
from ssd.monitor.messages import SNAPSHOTS, Process, Snapshot, TraceNews

Directions = list[tuple[list[p.Message], p.Direction]]


def of_plugins(to_draft: list[p.Message]) -> Directions:
    """What plugins send: `directions` in the file messages.py of their tests, which gets what a draft is told here."""
    found: Directions = []
    for file in sorted(Path(__file__).parents[1].glob("plugins/*/messages.py")):
        found += importlib.import_module(f"tests.plugins.{file.parent.name}.messages").directions(to_draft)
    return found


METRICS = p.Metrics(
    mode="ssd", rounds=5, accepted_by_source={"lookup": 3}, hit_rate=0.75, verify_ms=12.5, cached_tokens=16
)
LOGPROB = p.TokenLogprob(3, -0.25, [(3, -0.25), (4, -2.0)])
SPECULATION = Speculation(num_speculative_tokens=2, fan_out=(3, 2, 4), backup="none")
PARAMS = SamplingParams(
    temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=MAX_SEED, max_tokens=9, stop=("\n", "end"),
    stop_token_ids=(1, 2), ignore_eos=True, logprobs=5, speculation=SPECULATION,
)  # fmt: skip
EMISSION = m.Emission(7, [1, 2], [LOGPROB, LOGPROB], "stop", METRICS, prompt_logprobs=[LOGPROB], source="lookup")

TO_FRONTEND: list[p.Message] = [
    p.Generate(1, prompt="naïve 🙂", params=PARAMS),
    p.Generate(2**63 - 1, token_ids=[0, 2**31 - 1], params=None),
    p.Generate(3, messages=[p.ChatMessage("user", "hello")]),
    p.Cancel(4),
    p.Describe(),
]
TO_CLIENT: list[p.Message] = [
    p.Description(
        "target",
        ["target"],
        "draft",
        Speculation(num_speculative_tokens=4, fan_out=(3,), backup="jit"),
        49152,
        2048,
        True,
        SamplingDefaults(0.6, top_k=20),
    ),
    p.Chunk(1, "text", [5, 6], [LOGPROB]),
    p.Done(1, "length", "", [1], p.Usage(1, 2), METRICS),
    p.Done(1, "stop", "", [1], p.Usage(1, 0), METRICS, bytes(8)),
    p.Failed(1, "invalid_request", "why"),
]
TO_TARGET: list[p.Message] = [
    m.Hello("draft", imports=False),
    m.Hello("draft", reads=["laptop"]),
    m.Readers(["laptop", "phone"], [1, 2**63 - 1]),
    m.Readers(None, []),
    m.Submit(1, [1, 2], PARAMS),
    m.Abort(1),
]
TO_DRAFT: list[p.Message] = [
    m.Ready(),
    m.Ready([m.ArenaHandle("draft_probs", 2**40, bytes(64), bytes(range(16)), b"m" * 16)]),
    m.Admit(1, 0, 3, [1, 2], Law(0.8, 40, 0.95, 0.05, 17), SPECULATION),
    m.Outcomes([m.Verified(1, 3, 2, 9, None), m.Verified(2, 0, 0, 9, 4)]),
    m.Launched([m.Launch(1, 3, 4, [5, 6, 7, 8])]),
    m.Retune([(1, Speculation("ssd", 2, (3, 2, 1), "jit"))]),
    m.Rehearse(4, in_turn=True),
    m.Release([1, 2]),
    m.Rejoin(),
    m.Leave(),
]
DIRECTIONS: Directions = [
    (TO_FRONTEND, p.CLIENT_TO_FRONTEND),
    (TO_CLIENT, p.FRONTEND_TO_CLIENT),
    (TO_TARGET, m.PEER_TO_TARGET),
    ([m.Ready(), m.Step([EMISSION, m.Emission(8, [])])], m.TARGET_TO_FRONTEND),
    (TO_DRAFT, m.TARGET_TO_DRAFT),
    (
        [
            m.Status("target", "failed", "why", 2),
            m.Loading(2**40, 2**41),
            m.DraftWanted(),
            m.FrontendReport(
                m.Load(running=1, link=m.LinkLoad(0.02, 0.001, 9, 3, 800, 40, 5)),
                2,
                "ready",
                [m.RoundEvent(10**12, 7, 3, 4, 2, "hit", False, "draft")],
                [m.EndEvent(10**12, 7, 5, 9, "stop", METRICS)],
                dropped=1,
            ),
        ],
        m.CHILD_TO_SUPERVISOR,
    ),
    (
        [
            Snapshot(
                engine="ssd-x",
                at=10**12,
                model="target",
                draft="draft",
                speculation=SPECULATION,
                whole=True,
                processes=[Process("target", 77, "up", 2**30, 0.1)],
                traces=[TraceNews("target", b"\0" * 64)],
                reports=[],
            )
        ],
        SNAPSHOTS,
    ),
    ([m.Drain(1.0), m.TargetLost(), m.Watch(3.0)], m.SUPERVISOR_TO_CHILD),
    ([m.RankStep([m.RowStep(3, 17, [5, 6], 2, 1, [9])], [Law(0.8, 3, 0.9, 0.1, 2**63 - 1)])], m.RANK_STEP),
]
DIRECTIONS += of_plugins(TO_DRAFT)
CASES = [(message, direction) for messages, direction in DIRECTIONS for message in messages]
ENDS = [direction for _, direction in DIRECTIONS]
ALL = [message for message, _ in CASES]
HEADER = p.pack(p.Describe())[0]


def header(direction: p.Direction) -> bytes:
    return struct.pack("<3sBI", p.MAGIC, direction.version, 0)


def refused(frames: list[bytes], direction: p.Direction = p.CLIENT_TO_FRONTEND) -> str:
    with pytest.raises(p.BadFrame) as caught:
        p.unpack(frames, direction)
    return str(caught.value)


def body(fields: dict[str, Any], direction: p.Direction = p.CLIENT_TO_FRONTEND) -> list[bytes]:
    return [header(direction), msgspec.msgpack.encode(fields)]


def name(message: p.Message) -> str:
    return type(message).__name__


# -- what is sent arrives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "direction"), CASES, ids=lambda part: name(part) if isinstance(part, p.Message) else ""
)
def test_round_trip(message: p.Message, direction: p.Direction) -> None:
    for epoch in (0, 1, 2**32 - 1):
        assert p.unpack(p.pack(message, epoch, direction.version), direction) == (epoch, message)
        if not isinstance(message, m.InternalMessage) or direction.version == m.INTERNAL_VERSION:
            assert p.pack(message, epoch) == p.pack(message, epoch, direction.version)


def test_every_message_is_in_the_table_above() -> None:
    bases = {type(message).__base__ for message in ALL}
    known = {message for base in bases if base is not None for message in base.__subclasses__()}
    assert {type(message) for message in ALL} == known - bases


def test_public_and_internal_messages_have_versions_of_their_own() -> None:
    assert {message.version for message in TO_FRONTEND + TO_CLIENT} == {p.PROTOCOL_VERSION}
    internal = {message.version for message in ALL if isinstance(message, m.InternalMessage)}
    assert internal == {m.INTERNAL_VERSION} != {p.PROTOCOL_VERSION}


@pytest.mark.parametrize(("messages", "direction"), DIRECTIONS)
def test_a_direction_takes_its_own_messages_only(messages: list[p.Message], direction: p.Direction) -> None:
    own = {type(message) for message in messages}
    for message in ALL:
        if type(message) not in own:
            refused(p.pack(message), direction)
            refused([header(direction), p.pack(message)[1]], direction)


# -- frames -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3, 100])
def test_wrong_number_of_frames(count: int) -> None:
    refused((p.pack(p.Describe()) * 50)[:count])


@pytest.mark.parametrize("header", [b"", HEADER[:-1], HEADER + b"\0", b"SSE" + HEADER[3:], b"ssd" + HEADER[3:]])
def test_wrong_header(header: bytes) -> None:
    refused([header, p.pack(p.Describe())[1]])


@pytest.mark.parametrize(
    ("version", "message", "direction"),
    [(version, p.Describe(), p.CLIENT_TO_FRONTEND) for version in (0, p.PROTOCOL_VERSION + 1, 255)]
    + [(version, m.Abort(1), m.PEER_TO_TARGET) for version in (p.PROTOCOL_VERSION, m.INTERNAL_VERSION + 1)],
)
def test_another_version_is_named(version: int, message: p.Message, direction: p.Direction) -> None:
    wrong = struct.pack("<3sBI", p.MAGIC, version, 0)
    assert f"version {version}" in refused([wrong, p.pack(message)[1]], direction)


@pytest.mark.parametrize("message", ALL, ids=name)
def test_a_message_that_is_cut_off_or_goes_on(message: p.Message) -> None:
    _, whole = p.pack(message)
    for direction in ENDS:
        for length in range(0, len(whole), 7):
            refused([header(direction), whole[:length]], direction)
        refused([header(direction), whole + b"\0"], direction)


# -- bodies -----------------------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": NAN}, {"temperature": INF}, {"temperature": -0.1}, {"temperature": 1e9},
        {"top_p": NAN}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": NAN}, {"min_p": -1e-9}, {"min_p": 2},
        {"top_k": -1}, {"top_k": 2**31}, {"seed": -1}, {"seed": 2**63}, {"seed": 1.5}, {"max_tokens": 0},
        {"max_tokens": 2**31}, {"stop": [""]}, {"stop": ["x" * 257]}, {"stop": ["a"] * 65}, {"stop_token_ids": [-1]},
        {"stop_token_ids": [0] * 65}, {"logprobs": 21}, {"logprobs": -1}, {"ignore_eos": 1}, {"temprature": 1.0},
        {"speculation": {"mode": "fast"}}, {"speculation": {"num_speculative_tokens": -1}},
        {"speculation": {"num_speculative_tokens": 17}}, {"speculation": {"fan_out": [17]}},
        {"speculation": {"fan_out": [-1]}}, {"speculation": {"fan_out": [1] * 18}}, {"speculation": {"k": 4}},
    ],
)  # fmt: skip
def test_parameters_out_of_bounds(params: dict[str, Any]) -> None:
    refused(body({"type": "Generate", "id": 1, "prompt": "x", "params": params}))
    submit = {"type": "Submit", "request": 1, "token_ids": [1], "params": params}
    refused(body(submit, m.PEER_TO_TARGET), m.PEER_TO_TARGET)


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"type": "Generate"}, {"type": "Nonsense", "id": 1}, {"type": 3}, {"id": 1},
        {"type": "Cancel", "id": -1}, {"type": "Cancel", "id": 2**63}, {"type": "Cancel", "id": 2**64 - 1},
        {"type": "Cancel", "id": "1"}, {"type": "Cancel", "id": None}, {"type": "Cancel", "id": 1, "extra": 0},
        {"type": "Generate", "id": 1, "token_ids": [-1]}, {"type": "Generate", "id": 1, "token_ids": [2**31]},
        {"type": "Generate", "id": 1, "token_ids": [NAN]}, {"type": "Generate", "id": 1, "prompt": b"bytes"},
        {"type": "Generate", "id": 1, "token_ids": [0] * (p.MAX_PROMPT_TOKENS + 1)},
        {"type": "Generate", "id": 1, "messages": [{"role": "function", "content": ""}]},
        {"type": "Generate", "id": 1, "messages": [{"role": "user", "content": "", "mood": "x"}]},
        {"type": "Generate", "id": 1, "messages": [{"role": "user", "content": ""}] * 1025},
    ],
    ids=lambda fields: str(fields)[:60],
)  # fmt: skip
def test_fields_out_of_bounds(fields: dict[str, Any]) -> None:
    refused(body(fields))


@pytest.mark.parametrize("number", [NAN, INF, -INF, 1e300])
def test_results_are_bounded_too(number: float) -> None:
    """What another process of our own sends is believed no more than a client."""
    refused(p.pack(m.Step([m.Emission(1, [1], metrics=p.Metrics(hit_rate=number))])), m.TARGET_TO_FRONTEND)
    refused(p.pack(m.Step([m.Emission(1, [1], [p.TokenLogprob(1, number, [])])])), m.TARGET_TO_FRONTEND)
    refused(p.pack(m.Admit(1, 0, 0, [1], Law(number), SPECULATION)), m.TARGET_TO_DRAFT)


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\x81\xa4type\x91", b"\x83\xa4type\xa8Generate\xa6params"])
@pytest.mark.parametrize("depth", [100, 100_000, 1_000_000])
def test_deep_nesting(opening: bytes, depth: int) -> None:
    for direction in ENDS:
        refused([header(direction), opening + b"\x91" * depth], direction)
        refused([header(direction), opening * (depth // len(opening))], direction)


@pytest.mark.parametrize(
    "claim", [b"\xdb\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
)
def test_a_length_that_is_not_there(claim: bytes) -> None:
    """Four billion characters, items, pairs or bytes are announced and none follows."""
    refused([HEADER, b"\x82\xa4type\xa8Generate\xa6prompt" + claim])


def test_text_that_is_not_utf8() -> None:
    refused([HEADER, b"\x83\xa4type\xa8Generate\xa2id\x01\xa6prompt\xa2\xff\xfe"])
    refused([HEADER, b"\x83\xa4type\xa8Generate\xa2id\x01\xa2\xff\xfe\x01"])


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was executed",))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_are_not_opened(protocol: int) -> None:
    bomb = pickle.dumps(Bomb(), protocol)
    for direction in ENDS:
        refused([header(direction), bomb], direction)
        refused([bomb, bomb], direction)
        refused(body({"type": "Generate", "id": 1, "prompt": bomb}, direction), direction)


# -- anything at all --------------------------------------------------------------------------------------------------

values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.binary()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def survives(frames: list[bytes]) -> None:
    """Each direction reads the frames as one of its messages or refuses them with `BadFrame`, also in its version."""
    for direction in ENDS:
        for tried in (frames, [header(direction), *frames[1:]]):
            try:
                epoch, message = p.unpack(tried, direction)
            except p.BadFrame:
                continue
            assert isinstance(message, p.Message) and 0 <= epoch < 2**32


@settings(max_examples=500)
@given(st.lists(st.binary(max_size=60), max_size=4))
def test_any_frames(frames: list[bytes]) -> None:
    survives(frames)


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_any_body(scribble: bytes) -> None:
    survives([HEADER, scribble])


@settings(max_examples=500)
@given(st.sampled_from(ALL), st.data())
def test_a_message_with_changed_bytes(message: p.Message, data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in p.pack(message)]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = data.draw(st.sampled_from(frames))
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    survives([bytes(frame) for frame in frames])


@settings(max_examples=500)
@given(st.sampled_from(ALL), st.data(), values)
def test_a_message_with_any_value_in_a_field(message: p.Message, data: st.DataObject, value: Any) -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    fields[data.draw(st.sampled_from([*fields, "other"]))] = value
    survives(body(fields))
