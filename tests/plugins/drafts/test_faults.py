"""An EAGLE-3 head in a process of its own: its features come from another, and may be all that survives it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from ssd import LLM, SamplingParams
from ssd.client import Completion
from ssd.config.params import Speculation
from tests.draft.pair import Pair, config, params
from tests.exactness.plain import Plain
from tests.faults.engine import gone
from tests.models import tiny
from tests.plugins.drafts import heads

PROMPT, TOKENS = tiny.token_ids(30, 30), 60


def right(completion: Completion) -> bool:
    """Whether there were draft tokens, most of them right. How often there are any is a matter of the clock."""
    return completion.metrics.accepted_tokens > completion.metrics.drafted_tokens / 2


def test_it_speculates_is_killed_and_speculates_again(tmp_path: Path) -> None:
    target = tiny.tokenizer(heads.target(tmp_path / "target", vocab_size=300))
    alone = Pair(config(Speculation("ar"), vocab_size=300), tiny.runner(target)).run([PROMPT], params(1, TOKENS)).ids[0]
    head = heads.head(tmp_path / "head", 300, vocab_size=300)
    student = heads.PlainHead(head, Plain(target), torch.float32)
    student.train([[*PROMPT, *alone]], steps=60, depth=4)
    student.save(head)
    asked = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    options = {"num_speculative_tokens": 3, "backup": "jit", "dtype": "float32", "draft_dtype": "float32"}
    with LLM(str(target), str(head), mode="sd", **options) as llm:
        first = llm.generate([PROMPT], asked)[0]
        assert first.token_ids == alone and right(first)
        draft = llm.engine.pids["draft"]
        os.kill(draft, signal.SIGKILL)
        assert gone(draft)
        for _ in range(200):  # in the first of these there is no draft
            again = llm.generate([PROMPT], asked)[0]
            assert again.token_ids == alone
            if again.metrics.drafted_tokens:
                break
        assert right(again) and again.metrics.cached_tokens > 0
        ahead = SamplingParams(max_tokens=TOKENS, ignore_eos=True, speculation=Speculation("ssd", 3, (2,), "jit"))
        assert llm.generate([PROMPT], ahead)[0].token_ids == alone
    with LLM(str(target), str(head), mode="sd", tensor_parallel_size=2, **options) as llm:
        split = llm.generate([PROMPT], asked)[0]
        assert split.token_ids == alone and right(split)
