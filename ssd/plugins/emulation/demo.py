"""The part of `ssd demo` with the paper's 70B pair on emulated devices."""

from __future__ import annotations

from ssd.bench.datasets import RANDOM, prompts
from ssd.bench.runs import Runs, measure
from ssd.bench.settings import Protocol, Setting, Sweep
from ssd.cli.bench_job import base_speculation, sized
from ssd.cli.session import session
from ssd.config.engine import EngineConfig
from ssd.launch.options import EngineOptions
from ssd.plugins.emulation.agreement import PRESETS
from ssd.plugins.emulation.bench import Emulation

_PAIR = PRESETS["llama"]
_PROMPTS, _TOKENS = 2, 96


class PaperPair:
    title = "The 70B pair of arXiv 2603.03251, emulated"
    about = f"""\
EMULATED: no GPU is used and no weights are loaded. A forward sleeps as long as on the paper's devices:
{_PAIR.models}. The tokens are a script's; the draft guesses as many of them as the
paper's does. Processes, messages and scheduling are the real engine's. In sd target and draft take turns; in ssd the
draft works ahead while the target verifies."""
    name = "70B, emulated"
    help = "and on the paper's 70B pair, emulated"
    last = "A draft pays most where it has hardware of its own, as on the emulated devices."

    def measured(self, max_tokens: int) -> tuple[EngineConfig, list[Setting], Runs]:
        base = base_speculation(EngineOptions())
        settings = Sweep(("ar", "sd", "ssd"), (_PAIR.lookahead,), ((_PAIR.fan_out,),)).settings(base)
        emulation = Emulation(_PAIR.times, _PAIR.agreement(0.0))
        with emulation.configured(sized(EngineOptions(), settings)) as config, session(config) as client:
            protocol = Protocol(min(max_tokens, _TOKENS), chat=False)
            asked = prompts(RANDOM, _PROMPTS, config.vocab_size)
            return config, settings, measure(client, asked, settings, 0.0, protocol)


PAPER_PAIR = PaperPair()
