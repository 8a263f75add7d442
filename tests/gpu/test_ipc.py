"""What two processes share on a device: rows that flow, ends that leave nothing, and the engine that rests on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ssd import LLM, SamplingParams
from ssd.config.params import Speculation
from ssd.ipc.arenas import Exported, HostTensor, Imported, settle
from ssd.ipc.messages import ArenaHandle
from ssd.ipc.process import memory_file
from tests.draft.pair import Pair, config, params
from tests.exactness.plain import Plain
from tests.faults.engine import descriptors, gone
from tests.models import tiny

SIZE = 64 * 2**20
WORDS = SIZE // 8
KEPT = SIZE // 2  # bytes that the driver may keep after a first use; a tensor that leaks is larger
ROOT = Path(__file__).parents[2]
SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256, "gpu_memory_utilization": 0.5}
EXACT = {"dtype": "float32", "draft_dtype": "float32"}  # in 16 bits a draft is no longer its target
FELL_BACK = "shares memory of the host"


class Peer:
    """The other process (`tests.gpu.peer`), with a tensor of its own or of ours."""

    def __init__(self, asked: dict[str, Any], descriptor: int | None = None) -> None:
        self._handle = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.peer"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=() if descriptor is None else (descriptor,),
        )
        self.answer = self.ask(asked)

    def ask(self, asked: dict[str, Any]) -> Any:
        assert self._handle.stdin is not None and self._handle.stdout is not None
        self._handle.stdin.write(json.dumps(asked) + "\n")
        self._handle.stdin.flush()
        return json.loads(self._handle.stdout.readline())

    def kill(self) -> None:
        self._handle.kill()
        self._handle.communicate()


class Sharing:
    """Tensors that both have: exported on a GPU, a memory file on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._file = memory_file("shared", SIZE) if device.type == "cpu" else None
        self._held = ExitStack()
        if self._file is not None:
            self._held.callback(os.close, self._file)

    def ours(self) -> tuple[HostTensor | Exported, dict[str, Any]]:
        """One of this process, and what another opens it by."""
        if self._file is not None:
            return HostTensor(self._file, SIZE), {"descriptor": self._file, "size": SIZE}
        exported = Exported("shared", SIZE, self.device)
        return exported, {"open": msgspec.to_builtins(exported.handle)}

    def peer(self, asked: dict[str, Any]) -> Peer:
        peer = Peer(asked, self._file)
        self._held.callback(peer.kill)
        return peer

    def theirs(self) -> tuple[Peer, HostTensor | Imported]:
        """One of another process, and our view of it."""
        if self._file is not None:
            return self.peer({"descriptor": self._file, "size": SIZE}), HostTensor(self._file, SIZE)
        peer = self.peer({"export": SIZE})
        return peer, Imported(msgspec.convert(peer.answer, ArenaHandle), self.device)

    def left(self) -> int:
        """Free memory of the device; without one, that of descriptors."""
        return -descriptors() if self._file is not None else torch.cuda.mem_get_info(self.device)[0]

    def close(self) -> None:
        self._held.close()


@pytest.fixture
def sharing(device: torch.device, alone: None) -> Iterator[Sharing]:
    """Its tests measure the free memory of the device, so they run alone."""
    found = Sharing(device)
    if device.type == "cuda":  # what a context and these kernels take is taken
        torch.zeros(WORDS, dtype=torch.int64, device=device).fill_(1).sum().item()
    yield found
    found.close()


def comes_back(sharing: Sharing, free: int) -> bool:
    """Return True once as much is free as before: the driver may take a moment after a death."""
    deadline, least = time.monotonic() + 30, free - KEPT if sharing.device.type == "cuda" else free
    while sharing.left() < least and time.monotonic() < deadline:
        time.sleep(0.05)
    return sharing.left() >= least


def total(shared: HostTensor | Exported | Imported) -> int:
    return int(shared.data.view(torch.int64).sum())


def test_what_one_process_writes_the_other_reads(sharing: Sharing) -> None:
    shared, opens = sharing.ours()
    peer = sharing.peer(opens)
    for value in (3, 2**33, 0):
        shared.data.view(torch.int64).fill_(value)
        settle(shared.data)
        assert peer.ask({"sum": 0}) == value * WORDS
        peer.ask({"fill": value + 1})
        assert total(shared) == (value + 1) * WORDS
    peer.kill()
    shared.close()


def test_a_reader_that_is_killed_while_it_writes_leaves_nothing(sharing: Sharing) -> None:
    shared, opens = sharing.ours()
    free = sharing.left()
    for value in range(4 if sharing.device.type == "cuda" else 2):  # a memory file has little to leave behind
        peer = sharing.peer(opens)
        peer.ask({"scribble": value})
        peer.kill()
        assert comes_back(sharing, free)
        shared.data.view(torch.int64).fill_(value)
        settle(shared.data)
        assert total(shared) == value * WORDS
    shared.close()


def test_an_exporter_is_killed_and_another_one_takes_its_place(sharing: Sharing) -> None:
    free = sharing.left()
    for value in range(3 if sharing.device.type == "cuda" else 2):
        peer, shared = sharing.theirs()
        peer.ask({"fill": value})
        assert total(shared) == value * WORDS
        peer.kill()
        shared.close()
        del shared
        assert comes_back(sharing, free)


# -- the engine -------------------------------------------------------------------------------------------------------

PROMPT, TOKENS = tiny.token_ids(30, 30), 60
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
PLAIN = SamplingParams(max_tokens=TOKENS, ignore_eos=True, speculation=Speculation("ar"))
# Times that something is asked for until a draft has brought tokens: on a busy machine it is left alone for a while.
_ASKED = 200


def test_laws_cross_on_the_device(
    device: torch.device, pair: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a draft that is the target nearly all is accepted, which a law of anything else would not be; at temperature
    0 the ids are those of `ar`."""
    target = str(pair[0])
    places = {"device": str(device), "draft_device": str(device), **EXACT}
    drawn = [  # guesses of the suffix memory are not the draft's
        SamplingParams(temperature=1.0, seed=seed, max_tokens=TOKENS, ignore_eos=True, store=False) for seed in range(4)
    ]
    options = {"mode": "sd", "sampler": "rejection", "num_speculative_tokens": 3, "deterministic": True}
    with LLM(target, target, **places, **SIZES, **options) as llm:
        assert llm.generate([PROMPT], GREEDY)[0].token_ids == llm.generate([PROMPT], PLAIN)[0].token_ids
        drafted = accepted = 0
        for _ in range(_ASKED):
            for completion in llm.generate([PROMPT] * 4, drawn):
                drafted += completion.metrics.drafted_tokens
                accepted += completion.metrics.accepted_tokens
            if drafted >= TOKENS:
                break
    assert drafted >= TOKENS and accepted > 0.9 * drafted
    assert FELL_BACK not in capfd.readouterr().err


def share_of_right(llm: LLM, expected: list[int]) -> float:
    """How many of the draft's tokens are, once it has brought some: after a start, and whenever a clock says that it
    does not pay, it brings none."""
    drafted = accepted = 0
    for _ in range(_ASKED):
        answer = llm.generate([PROMPT], GREEDY)[0]
        assert answer.token_ids == expected
        drafted += answer.metrics.drafted_tokens
        accepted += answer.metrics.accepted_tokens
        if drafted >= TOKENS:
            break
    assert drafted, f"the draft brought nothing in {_ASKED} answers"
    return accepted / drafted


def test_hidden_states_cross_on_the_device(
    device: torch.device, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A head that has learnt one answer by heart says it again from the target's states, and so does the one that
    takes its place when it is killed."""
    from tests.plugins.drafts import heads

    # Of so many layers that it pays to wait for the head, which the engine goes by.
    target = tiny.tokenizer(heads.target(tmp_path / "target", vocab_size=300, num_hidden_layers=24))
    alone = Pair(config(Speculation("ar"), vocab_size=300), tiny.runner(target)).run([PROMPT], params(1, TOKENS)).ids[0]
    head = heads.head(tmp_path / "head", 300, vocab_size=300)
    student = heads.PlainHead(head, Plain(target), torch.float32)
    student.train([[*PROMPT, *alone]], steps=60, depth=4)
    student.save(head)
    places = {"device": str(device), "draft_device": str(device), **EXACT}
    options = {"mode": "sd", "num_speculative_tokens": 3, "backup": "jit", "deterministic": True}
    with LLM(str(target), str(head), **places, **SIZES, **options) as llm:
        expected = llm.generate([PROMPT], PLAIN)[0].token_ids
        assert share_of_right(llm, expected) > 0.5
        draft = llm.engine.pids["draft"]
        os.kill(draft, signal.SIGKILL)
        assert gone(draft)
        assert share_of_right(llm, expected) > 0.5
    assert FELL_BACK not in capfd.readouterr().err
