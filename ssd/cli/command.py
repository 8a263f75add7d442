"""Commands with many options, their help by headings."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import click

from ssd.config.descriptions import HEADINGS, MAIN, OTHER
from ssd.errors import did_you_mean
from ssd.launch.options import EngineOptions
from ssd.system import registered

_HELP_ALL = "ssd.help-all"  # of a context: every option is shown
_VARIABLES = "CACHE CONFIG FAILPOINTS KERNELS LOG OVERLAP PDL PREBUILT SPECULATIVE_CONFIG TEST_DEVICE"
"""Variables, after `SSD_`, that are no engine or server option."""


class HeadedOption(click.Option):
    def __init__(self, *args: Any, heading: str = OTHER, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading


headed = partial(click.option, cls=HeadedOption)
main_option = partial(headed, heading=MAIN)


class GroupedCommand(click.Command):
    """A command whose --help shows its main options, and --help-all every option under its heading."""

    def __init__(self, *args: Any, examples: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples.strip().splitlines()
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_all,
                help="Show every option and exit.",
            )
        )

    def invoke(self, ctx: click.Context) -> Any:
        _warn_of_unknown_variables()
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option) and not param.hidden]
        groups: dict[str, list[click.Option]] = {heading: [] for heading in HEADINGS}
        for option in options:
            groups[getattr(option, "heading", OTHER)].append(option)
        brief = not ctx.meta.get(_HELP_ALL)
        if brief:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}{example}\n")
            groups = {MAIN: groups[MAIN] + [option for option in options if option.name in ("help", "help_all")]}
        for heading, members in groups.items():
            records = [option.get_help_record(ctx) for option in members]
            if shown := [record for record in records if record is not None]:
                with formatter.section(heading):
                    formatter.write_dl(shown)
        if brief:
            formatter.write(f"\n{ctx.command_path} --help-all shows all {len(options)} options.\n")


def _show_all(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        ctx.meta[_HELP_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def server_options() -> tuple[str, ...]:
    from ssd.launch.server import ServerOptions  # with it comes ZeroMQ, which help needs not

    return ServerOptions.__struct_fields__


def _warn_of_unknown_variables() -> None:
    options = (*EngineOptions.__struct_fields__, *server_options())
    rounds = [f"{name.upper()}_ROUND_MS" for name in registered.names(registered.LOAD_FORMATS)]
    known = {f"SSD_{name}" for name in (*map(str.upper, options), *_VARIABLES.split(), *rounds)}
    unknown = sorted(name for name in os.environ if name.startswith("SSD_") and name not in known)
    if unknown:
        words = ", ".join(name + did_you_mean(name, known) for name in unknown[:3]) + ", ..." * (len(unknown) > 3)
        click.echo(f"warning: no setting has the name {words}", err=True)
