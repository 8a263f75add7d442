"""Messages between the frontend and its text workers: four bytes of length, then MessagePack."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Annotated, Any, BinaryIO, TypeAlias

import msgspec
from msgspec import Meta

from ssd.config.params import Structured
from ssd.frontend.detokenization import TemplateFacts, Vocabulary
from ssd.frontend.fill_in import File
from ssd.ipc.public import ChatMessage, ChatOptions
from ssd.system.cgroups import available_bytes

LENGTH = struct.Struct("<I")
MAX_FRAME = 64 << 20  # bytes
_MEMORY_SHARE, _LEAST_BYTES, _MOST_BYTES = 4, 256 << 20, 1 << 30


def memory_bytes() -> int:
    """Return the bytes that a text may take beside the loaded tokenizer."""
    return min(_MOST_BYTES, max(_LEAST_BYTES, available_bytes() // _MEMORY_SHARE))


class TextWorker(IntEnum):
    """The text workers, by kind of work. Each is one process at a time, and no worker waits for another."""

    PROMPT = 0
    CHAT = 1  # runs the model's own template, which may be slow for short messages too
    LONG = 2  # prompts and conversations of more than `LONG_TEXT` characters
    LOOKUP = 3  # texts that are not part of a request for tokens
    GRAMMAR = 4


LONG_TEXT = 16 << 10  # characters
NICENESS = {TextWorker.LONG: 10, TextWorker.LOOKUP: 10, TextWorker.GRAMMAR: 10}
_LEAST_CPU_S, _CHARACTERS_A_SECOND, _COMPILE_CPU_S = 2, 256 << 10, 2


class _Job(msgspec.Struct, tag=True, frozen=True):
    @property
    def size(self) -> int:
        """Return the number of characters, or of token ids."""
        return 0

    @property
    def is_long(self) -> bool:
        """Return True if the worker's process ends after this job, which frees its memory."""
        return self.size > LONG_TEXT


class Encode(_Job, tag=True, frozen=True):
    """Encodes a text, or a conversation by the chat template; with `plain_tools` that gets tools as text.

    With `keep`, only the last `keep` ids are kept. If more than `most` are left, only their count is returned."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    chat: ChatOptions = ChatOptions()
    add_special_tokens: bool = True
    most: int = 0
    as_json: bool = False
    keep: int | None = None
    plain_tools: bool = False

    @property
    def size(self) -> int:
        said = sum(said.characters for said in self.messages or ())
        return len(self.prompt or "") + said + len(self.chat.template_kwargs) + len(self.chat.tools)


class Fill(_Job, tag=True, frozen=True):
    """Encodes the prompt for the text between two texts; with `fits` it is cut to `most` ids."""

    prefix: str
    suffix: str
    files: list[File]
    most: int
    fits: bool

    @property
    def size(self) -> int:
        return len(self.prefix) + len(self.suffix) + sum(len(file.name) + len(file.text) for file in self.files)


class Decode(_Job, tag=True, frozen=True):
    """Decodes ids to text without special tokens."""

    token_ids: list[int]

    @property
    def size(self) -> int:
        return len(self.token_ids)


class Check(_Job, tag=True, frozen=True):
    """Compiles the chat template and returns its `TemplateFacts`."""


class Compile(_Job, tag=True, frozen=True):
    """Compiles a grammar as the target will, behind the rules `free`."""

    asked: Structured
    free: str

    @property
    def size(self) -> int:
        return len(self.asked.source)

    @property
    def is_long(self) -> bool:
        # The next process would have to load the tokenizer for grammars again.
        return False


class Encoded(msgspec.Struct, tag=True, frozen=True):
    """The reply to `Encode` and `Fill`; `ids` are 32-bit integers in native order, or a JSON array (`as_json`)."""

    count: int
    ids: bytes


class Decoded(msgspec.Struct, tag=True, frozen=True):
    text: str


class Compiled(msgspec.Struct, tag=True, frozen=True):
    """The reply to `Compile`: `grammar` is of the kind `compiled`.

    `left_out`: the keywords of schemas that it does not hold. `counts_tokens`: it limits the tokens of a part."""

    grammar: Structured
    left_out: list[str] = []
    counts_tokens: bool = False


class Broken(msgspec.Struct, tag=True, frozen=True):
    """The job cannot be done, for a reason that the client may see, as in a RequestError."""

    message: str
    code: str = "invalid_request"
    param: str | None = None


class WorkerEnded(msgspec.Struct, tag=True, frozen=True):
    """A worker's process ended by itself. `code` is that of `os.waitstatus_to_exitcode`."""

    worker: Annotated[int, Meta(ge=0, lt=len(TextWorker))]
    code: int


Job: TypeAlias = Encode | Fill | Decode | Check | Compile


def cpu_seconds(job: Job) -> int:
    """Return the CPU time that a job may take, in seconds: several times what ordinary tokenizers need."""
    if isinstance(job, Compile):
        return _COMPILE_CPU_S
    return _LEAST_CPU_S + job.size // _CHARACTERS_A_SECOND


JOB = msgspec.msgpack.Decoder(Job)
REPLY = msgspec.msgpack.Decoder(Encoded | Decoded | TemplateFacts | Compiled | Broken)
NEWS = msgspec.msgpack.Decoder(Vocabulary | Broken | WorkerEnded)
_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def read_frame(file: BinaryIO, decoder: msgspec.msgpack.Decoder[Any]) -> Any | None:
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return decoder.decode(file.read(LENGTH.unpack(head)[0]))
