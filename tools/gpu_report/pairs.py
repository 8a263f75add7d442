"""List pairs of the cost of known models: random weights with synthetic acceptance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ssd.config.emulation import StatedAgreement
from ssd.launch.options import EngineOptions
from ssd.models.checkpoint import inspect
from tools.gpu_report.forward import read_once
from tools.gpu_report.job import TINY, Job, config_folder
from tools.inflate.sizes import LIKE, Like, Sizes

_LOOKAHEAD, _FAN_OUT = 5, 3
STATED = StatedAgreement(0.8, 0.85, _LOOKAHEAD, _FAN_OUT)  # between the paper's Llama pair at T = 0 and at T = 1
_SMALL = Sizes(1024, 4, 16, 8, 64, 4096)


class _Other(NamedTuple):
    """A model of a family that `tools.inflate` cannot make."""

    said: dict[str, Any]

    def config(self, context: int) -> dict[str, Any]:
        return {"max_position_embeddings": context, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, **self.said}


def _small(vocab_size: int) -> Like:
    return Like("llama", vocab_size, _SMALL)


_HYBRID = {
    **{"model_type": "qwen3_5_text", "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 24},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 3584},
    **{"full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 16},
}
_GPT_OSS = {
    **{"model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 1440, "num_hidden_layers": 12},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 1440},
    **{"num_local_experts": 8, "num_experts_per_tok": 4, "sliding_window": 128},
}
PAIRS: dict[str, tuple[Like | _Other, Like]] = {
    "llama-8b small": (LIKE["llama-8b"], _small(128256)),
    "llama-8b 0.6b": (LIKE["llama-8b"], LIKE["qwen3-0.6b"]._replace(model_type="llama", vocab_size=128256)),
    "qwen3-32b 0.6b": (LIKE["qwen3-32b"], LIKE["qwen3-0.6b"]),
    "hybrid small": (_Other(_HYBRID), _small(151936)),
    "gpt_oss small": (_Other(_GPT_OSS), _small(201088)),
}
"""Targets and their drafts."""


class Case(NamedTuple):
    name: str
    options: EngineOptions
    synthetic: StatedAgreement | None


def cases(
    job: Job,
    folder: Path,
    most: int,
    names: Sequence[str],
    draft_devices: Sequence[str],
    options: Mapping[str, Any],
) -> Iterator[Case]:
    """Yield an engine for up to `most` sequences for each of the pairs (`PAIRS`) and draft devices.

    The job's pair is one of them, unless it is a made one. No engine has the suffix memory, which would soon know the
    texts."""
    pairs = {name: PAIRS[name] for name in names}
    if job.tiny:
        pairs = {"tiny": (TINY, TINY._replace(sizes=replace(TINY.sizes, num_hidden_layers=1)))}
    common = {"device": job.device, "max_num_seqs": most, "max_model_len": 1024, "mode": "ssd", "dtype": "bfloat16"}
    common |= {"num_speculative_tokens": _LOOKAHEAD, "fan_out": (_FAN_OUT,), "suffix_memory": 0, **options}
    for number, (name, pair) in enumerate(pairs.items()):
        made = zip(("target", "draft"), pair, strict=True)
        target, draft = (config_folder(folder, f"{role}-{number}", like.config(4096)) for role, like in made)
        small, large = (read_once(inspect(Path(directory), weights=False)) for directory in (draft, target))
        for device in draft_devices:
            chosen = {"target": target, "draft": (draft,), "draft_device": device, "load_format": "dummy"}
            yield Case(f"{name} ({small / large:.0%}) on {device}", EngineOptions(**(common | chosen)), STATED)
    if not job.made:
        for device in draft_devices:
            chosen = {"target": job.target, "draft": (job.draft,), "draft_device": device}
            name = f"{Path(job.target).name}, draft {Path(job.draft).name} on {device}"
            yield Case(name, EngineOptions(**(common | chosen)), None)
