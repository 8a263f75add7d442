"""Describes the machine and the engine of a measurement."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ssd import __version__
from ssd.config import cores, gpus
from ssd.config.engine import Cpus, EngineConfig
from ssd.config.params import Mode
from ssd.kernels import build
from ssd.system.version import commit
from ssd.tuning import draft_format


def environment() -> dict[str, Any]:
    """Return commit, machine and versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    gpus = _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    return {
        "commit": commit(),
        "cpu": model,
        "cores": len(cores.usable()),
        **({"gpus": gpus} if gpus else {}),
        "python": platform.python_version(),
        "torch": version("torch"),
        "ssd": __version__,
    }


def processors(machine: dict[str, Any]) -> str:
    """Return the GPUs of an `environment` in words, or its cores if there are none."""
    return ", ".join(machine.get("gpus") or [f"{machine['cores']} cores of {machine['cpu']}"])


def engine_facts(config: EngineConfig) -> dict[str, Any]:
    names = ("target_name", "draft_name", "device", "draft_device", "dtype", "quantize", "activations")
    more = ("target_cpus", "draft_cpus", "max_num_seqs", "max_model_len", "deterministic")
    chosen = draft_format.chosen(config, str(build.library()))
    facts = {name: getattr(config, name) for name in (*names, *more)}
    return facts | {"draft_format": None if chosen is None else str(chosen)}


def runs_on(config: EngineConfig, mode: Mode) -> str:
    """Return where a mode computes: "2 cores", "1+1 cores", "cuda:0+cuda:1"; "" for emulated devices."""
    if config.emulate is not None:
        return ""
    target, draft = set(config.target_cpus) or os.sched_getaffinity(0), set(config.draft_cpus)
    drafts = config.draft is not None and mode not in ("ar", "ngram")
    if config.device == config.draft_device == "cpu":
        if config.elastic_cores and mode != "ssd":
            return _count(len(target | draft))
        apart = drafts and draft and not target & draft
        return f"{len(target)}+{len(draft)} cores" if apart else _count(len(target | draft if drafts else target))
    here, there = _place(config.device, target, len(config.ranks)), _place(config.draft_device, draft, 1)
    return f"{here}+{there}" if drafts and here != there else here


def hardware(config: EngineConfig) -> str:
    """Return a sentence that says if the modes are compared on equal hardware."""
    if config.draft is None:
        return ""
    if config.emulate is not None:
        return "Extra hardware: the draft has a device of its own, which ar and ngram do not use."
    if config.elastic_cores:
        every = _cores(tuple(sorted({*config.target_cpus, *config.draft_cpus})))
        parts = f"{_cores(config.target_cpus)} for the target and {_cores(config.draft_cpus)} for the draft"
        return f"Equal hardware: every mode has {every}. ssd divides them: {parts}."
    apart = bool(config.draft_cpus) and not set(config.target_cpus) & set(config.draft_cpus)
    if config.device == config.draft_device and not (config.device == "cpu" and apart):
        shared = "the cores" if config.device == "cpu" else config.device
        return f"Equal hardware: in every mode target and draft share {shared}."
    target, draft = (
        _cores(cpus) if device == "cpu" and cpus else device
        for device, cpus in ((config.device, config.target_cpus), (config.draft_device, config.draft_cpus))
    )
    return f"Extra hardware: the target has {target} in every mode, modes with a draft have {draft} as well."


def _place(device: str, cpus: set[int], ranks: int) -> str:
    if device == "cpu":
        return _count(len(cpus or os.sched_getaffinity(0)))
    numbers = gpus.of_ranks(device, ranks)
    return f"cuda:{numbers[0]}" + (f"-{numbers[-1]}" if len(numbers) > 1 else "")


def _count(cores: int) -> str:
    return "1 core" if cores == 1 else f"{cores} cores"


def _cores(cpus: Cpus) -> str:
    return f"core{'s' if len(cpus) > 1 else ''} {', '.join(map(str, cpus))}"


def _said(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
