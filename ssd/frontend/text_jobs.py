"""What the frontend asks of its text processes, and how both frame it: four bytes of length, then MessagePack."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Annotated, Any, BinaryIO, TypeAlias

import msgspec
from msgspec import Meta

from ssd.frontend.vocabulary import Vocabulary
from ssd.ipc.messages import ChatMessage

LENGTH = struct.Struct("<I")
MAX_FRAME = 64 << 20  # bytes
MEMORY_BYTES = 1 << 30
"""What one text may take beyond what the loaded tokenizer takes."""


class Lane(IntEnum):
    """The kinds of work. Work of one lane never waits for that of another; each lane has one process."""

    PROMPT = 0
    CHAT = 1  # runs the model's own template, which may be slow however short the messages are
    LONG = 2  # prompts and conversations of more than `LONG_TEXT` characters
    LOOKUP = 3  # texts that are not part of a request for tokens


LONG_TEXT = 16 << 10  # characters


NICENESS = {Lane.LONG: 10, Lane.LOOKUP: 10}
_LEAST_CPU_S, _CHARACTERS_A_SECOND = 2, 256 << 10


class _Job(msgspec.Struct, tag=True, frozen=True):
    @property
    def size(self) -> int:
        """In characters, or in ids."""
        return 0

    @property
    def is_long(self) -> bool:
        """Whether its process ends after it: the memory that it took goes back to the system."""
        return self.size > LONG_TEXT


class Encode(_Job, tag=True, frozen=True):
    """To token ids: a text, or a conversation by the chat template. Of more than `most` ids only the count comes
    back."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    most: int = 0
    as_json: bool = False

    @property
    def size(self) -> int:
        return len(self.prompt or "") + sum(len(said.content) for said in self.messages or ())


class Decode(_Job, tag=True, frozen=True):
    """To text, without special tokens."""

    token_ids: list[int]

    @property
    def size(self) -> int:
        return len(self.token_ids)


class Check(_Job, tag=True, frozen=True):
    """Compile the chat template."""


class Encoded(msgspec.Struct, tag=True, frozen=True):
    """`ids`: 32-bit little-endian numbers, or a JSON array of them."""

    count: int
    ids: bytes


class Decoded(msgspec.Struct, tag=True, frozen=True):
    text: str


class Checked(msgspec.Struct, tag=True, frozen=True):
    pass


class Broken(msgspec.Struct, tag=True, frozen=True):
    """It cannot be done, for a reason that the client may see; `code` is that of a RequestError."""

    message: str
    code: str = "invalid_request"


class Ended(msgspec.Struct, tag=True, frozen=True):
    """Server -> frontend: the process of a lane has ended by itself; `code` as `os.waitstatus_to_exitcode` has it."""

    lane: Annotated[int, Meta(ge=0, lt=len(Lane))]
    code: int


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """Server -> frontend: the tokenizer is loaded."""

    vocabulary: Vocabulary


Job: TypeAlias = Encode | Decode | Check


def cpu_seconds(job: Job) -> int:
    """The processor time that a job may take: several times what an honest model's files need."""
    return _LEAST_CPU_S + job.size // _CHARACTERS_A_SECOND


JOB = msgspec.msgpack.Decoder(Job)
REPLY = msgspec.msgpack.Decoder(Encoded | Decoded | Checked | Broken)
NEWS = msgspec.msgpack.Decoder(Welcome | Broken | Ended)
_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def read_frame(file: BinaryIO, decoder: msgspec.msgpack.Decoder[Any]) -> Any | None:
    """The next message of a blocking file; None at its end."""
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return decoder.decode(file.read(LENGTH.unpack(head)[0]))
