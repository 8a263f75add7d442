"""Shows the gain of speculation over plain decoding on a story, on an edit, and on the paper's pair, emulated."""

from __future__ import annotations

import shlex
import time
from typing import NamedTuple

import click

from ssd.cli.command import GroupedCommand, main_option
from ssd.cli.options import local_engine_options
from ssd.cli.outputs import console, grid
from ssd.cli.session import process_setup, session, show
from ssd.client import Client, Completion
from ssd.config.engine import EngineConfig
from ssd.config.params import DRAFTED, Speculation
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.plugins.bench.datasets import random_ids
from ssd.plugins.bench.emulation.agreement import PRESETS
from ssd.plugins.bench.environment import environment, processors, runs_on
from ssd.plugins.bench.figures import DISTURBED, bounded, differing, is_noise, rows
from ssd.plugins.bench.runs import Runs, measure
from ssd.plugins.bench.settings import Protocol, Setting, Sweep, base_speculation, sized
from ssd.plugins.bench.setup import Setup
from ssd.system import registered

_EXAMPLES = """
ssd demo
ssd demo "Write a poem about the sea."
ssd demo --model qwen2.5-coder
"""
_STORY = "Write a short story about a lighthouse keeper."
_TEXT = """\
The lighthouse stands on a small iland near the coast. Every evening the keeper climbs the stairs and lights the lamp. \
The ships that pass in the nite can see it from twenty miles away. In winter the waves are high and no boat can land, \
so the keeper has food for three months in the cellar."""
_CODE = """\
def area(width, height):
    return width * height

def volume(width, height, depth):
    return area(width, height) * depth

def surface(width, height, depth):
    sides = area(width, depth) + area(height, depth)
    return 2 * (area(width, height) + sides)
"""
_RAW_TOKENS = 64  # of an edit by a model without chat format, which does not end by itself
_TURNS, _TURNS_S = 5, 8.0  # turns of each mode: at most five, in about eight seconds for all modes

_INTRODUCTION = """\
The demo compares plain decoding (mode ar) with speculation, three times: less than a minute if nothing else runs.
Several tokens are proposed, and one forward of the model checks them all. A token is kept only where it is the one
that the model chooses itself: speculation changes the speed, not the tokens. The token ids are compared each time."""
_ABOUT_STORY = """\
Mode auto chooses what is fastest while it runs: a draft model, prompt lookup or plain decoding. Little of a story can
be guessed."""
_ABOUT_EDIT = """\
Most of the answer stands in the prompt. Prompt lookup proposes what followed the same words there. It needs no draft
model and no setting."""
_PAIR = PRESETS["llama"]
_PAIR_PROMPTS, _PAIR_LENGTH, _PAIR_TOKENS = 2, 256, 96
_ABOUT_PAIR = f"""\
EMULATED: no GPU is used and no weights are loaded. A forward sleeps as long as on the paper's devices:
{_PAIR.models}. The tokens are a script's; the draft guesses as many of them as the
paper's does. Processes, messages and scheduling are the real engine's. In sd target and draft take turns; in ssd the
draft works ahead while the target verifies."""
_LAST = "A draft pays most where it has hardware of its own, as on the emulated devices."
_NEXT = """\
Next: serve it over HTTP       ssd serve {target}
      compare every mode       ssd bench latency -m {target}"""
_PLAN = "      see what a draft costs   ssd plan -m {target}"


class _Gain(NamedTuple):
    """Tokens a second in mode `ar` (`plain`) and in the `mode` `asked` for; the engine's last `plan`."""

    mode: str
    plain: float
    asked: float
    length: float
    plan: str

    @property
    def over(self) -> float:
        return _ratio(self.asked, self.plain)

    @property
    def is_noise(self) -> bool:
        return is_noise(self.over, self.length)


@click.command(cls=GroupedCommand, examples=_EXAMPLES)
@click.argument("prompt", required=False)
@local_engine_options
@main_option("--max-tokens", type=click.IntRange(min=2), default=128, show_default=True, help="Longest answer.")
def demo(prompt: str | None, max_tokens: int, engine: EngineOptions) -> None:
    """Compare the mode asked for with plain decoding: on a story, on an edit, and on the paper's 70B pair, emulated.

    With PROMPT, on that alone. All modes have all cores, unless --target-cpus or --draft-cpus say otherwise."""
    config = resolve(engine)
    with process_setup():
        if prompt is None:
            click.echo(_INTRODUCTION)
        with session(config) as client:
            chat = client.describe().chat
            free = Protocol(max_tokens, chat, ignore_eos=False, sampling=config.sampling)
            if prompt is not None:
                _compared(config, client, prompt, free)
                return
            _headline(f"1. A story by {config.target_name}", _ABOUT_STORY, free)
            story = _compared(config, client, _STORY, free)
            exact = Protocol(max_tokens if chat else min(max_tokens, _RAW_TOKENS), chat, ignore_eos=False)
            _headline(f"2. An edit by {config.target_name}", _ABOUT_EDIT, exact)
            edit = _compared(config, client, _edit(engine, chat), exact)
        click.secho("\n3. The 70B pair of arXiv 2603.03251, emulated", bold=True)
        click.echo(_ABOUT_PAIR)
        gains = {"a story": story, "an edit": edit, "70B, emulated": _emulated(max_tokens)}
    click.secho("\nIn short: tok/s of plain decoding, and with speculation", bold=True)
    for title, gain in gains.items():
        said = f"{gain.mode}, disturbed" if gain.is_noise else gain.mode
        times = bounded(gain.over, gain.length)
        click.echo(f"  {title:<14}{gain.plain:6.1f} -> {gain.asked:6.1f}  {times} times ({said})")
    click.echo(f"This machine: {processors(environment())}. {_draft_words(config, story)}")
    click.echo(_LAST)
    for line in (_NEXT, _PLAN) if "plan" in registered.names(registered.COMMANDS) else (_NEXT,):
        click.echo(line.format(target=shlex.quote(engine.target)))


def _edit(engine: EngineOptions, chat: bool) -> str:
    if engine.target == EngineOptions().target:  # it can correct texts, but is too small for code
        return f"Correct the spelling of this text, and return all of it:\n\n{_TEXT}"
    if chat:
        return f"Return this code with type hints:\n\n```python\n{_CODE}```"
    return f"# The code:\n\n{_CODE}\n\n# The same code with type hints:\n\n"


def _headline(title: str, about: str, protocol: Protocol) -> None:
    own = protocol.sampling.given()
    penalties = [f"{name.replace('_', ' ')} {own[name]:g}" for name in own if name.endswith("penalty")]
    said = f"{', '.join(penalties)}: the model's own" if penalties else "no penalties"
    click.secho(f"\n{title}", bold=True)
    click.echo(f"{about}\nSampling: T = 0, {said}.\n")


def _compared(config: EngineConfig, client: Client, prompt: str, protocol: Protocol) -> _Gain:
    asked = Setting(config.speculation.mode, config.speculation)
    settings = [asked] if asked.name == "ar" else [Setting("ar", Speculation("ar")), asked]
    click.secho(f"{asked.name}> {prompt}\n", bold=True)
    began = time.perf_counter()
    shown = show(client, prompt, protocol.params(asked, 0.0, 0), protocol.chat)
    turns = int(_TURNS_S / len(settings) / (time.perf_counter() - began))
    runs = measure(client, [prompt] * max(1, min(turns, _TURNS)), settings, 0.0, protocol)
    return _reported(config, settings, runs, shown)


def _emulated(max_tokens: int) -> _Gain:
    base = base_speculation(EngineOptions())
    settings = Sweep(("ar", "sd", "ssd"), (_PAIR.lookahead,), ((_PAIR.fan_out,),)).settings(base)
    setup = Setup(_PAIR.times, _PAIR.agreement(0.0))
    with setup.configured(sized(EngineOptions(), settings)) as config, session(config) as client:
        prompts = random_ids(_PAIR_PROMPTS, _PAIR_LENGTH, config.vocab_size, seed=0)
        protocol = Protocol(min(max_tokens, _PAIR_TOKENS), chat=False)
        return _reported(config, settings, measure(client, prompts, settings, 0.0, protocol))


def _reported(config: EngineConfig, settings: list[Setting], runs: Runs, shown: Completion | None = None) -> _Gain:
    """Print the figures of `runs`, compare all ids with those of `ar`, return the last setting's gain."""
    found = rows(settings, runs, 0.0)
    plain, asked = found[0]["tok_s"], found[-1]
    cells = [
        (
            row["mode"],
            runs_on(config, setting.speculation.mode) or "emulated",
            f"{row['tok_s']:.1f}",
            bounded(_ratio(row["tok_s"], plain), row["acceptance_length"]),
            f"{row['acceptance_length']:.2f}",
        )
        for setting, row in zip(settings, found, strict=True)
    ]
    turns = len(runs["ar"])
    title = "one turn of each mode" if turns == 1 else f"medians of {turns} turns"
    console().print(grid(title, ("mode", "runs on", "tok/s", "over ar", "acceptance length"), cells, left=2))
    gain = _Gain(asked["mode"], plain, asked["tok_s"], asked["acceptance_length"], asked.get("plan", ""))
    if gain.plan:
        click.echo(f"{gain.mode}: {gain.plan}.")
    if gain.is_noise:
        click.echo(DISTURBED)
    same = not differing(found) and (shown is None or shown.token_ids == runs["ar"][0].completions[0].token_ids)
    click.echo("The same tokens." if same else "The tokens DIFFER: see docs/exactness.md.")
    return gain


def _ratio(speed: float, plain: float) -> float:
    return speed / plain if plain else 0.0  # an answer of one token has no speed


def _draft_words(config: EngineConfig, story: _Gain) -> str:
    if config.draft is None:
        return "No draft is loaded; prompt lookup needs none."
    if story.plan.partition(",")[0] not in DRAFTED:
        return "For a story a draft does not pay here, by its plan above."
    pays = story.over > 1 and not story.is_noise
    return f"For a story a draft {'pays' if pays else 'does not pay'} here: it was {'' if pays else 'not '}faster."
