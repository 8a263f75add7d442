"""The group of commands, each loaded when it is called. Errors become text here and nowhere else."""

from __future__ import annotations

# The built-in part of `signal`, which imports `enum`: Ctrl-C there would have a traceback.
import _signal  # type: ignore[import-not-found]
import os


class _Importing:
    """Lets Ctrl-C end this process at once: an exception within an import may be printed or lost."""

    def __enter__(self) -> None:
        self._is_ours = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
        try:
            if self._is_ours:
                _signal.signal(_signal.SIGINT, lambda number, _: os._exit(128 + number))
        except ValueError:  # not the main thread
            self._is_ours = False

    def __exit__(self, *_: object) -> None:
        if self._is_ours:
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)


with _Importing():
    import importlib
    import sys
    from typing import Any, NoReturn

    import click

    from ssd.errors import SsdError, UsageError, did_you_mean, out_of_memory
    from ssd.system import registered

# name -> (module:attribute, one line of help). `ssd --help` imports none of them.
_COMMANDS = {
    "generate": ("ssd.cli.generate:generate", "Complete a prompt, or a file of prompts."),
    "launch": ("ssd.cli.launch:launch", "Start an engine and keep it up (also: serve)."),
    "keys": ("ssd.cli.keys:keys", "Make and list the keys for clients over the network."),
    "pull": ("ssd.cli.models:pull", "Compile the kernels, and fetch a model, ahead."),
    "models": ("ssd.cli.models:models", "List what can be run here, or say what a checkpoint is."),
}
_ALIASES = {"serve": "launch"}


def _commands() -> dict[str, tuple[str, str]]:
    with _Importing():
        plugins = registered.load_all(registered.COMMANDS).values()
        return {
            **_COMMANDS,
            **{name: found for added in plugins for name, found in added.items() if name not in _COMMANDS},
        }


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = _ALIASES.get(cmd_name, cmd_name)
        entry = _COMMANDS.get(name) or _commands().get(name)
        if entry is None:
            hint = did_you_mean(cmd_name, (*_commands(), *_ALIASES))
            if plugin := registered.removed(registered.COMMANDS).get(cmd_name):
                hint = f": this installation has no plugin {plugin}"
            if not hint or ctx.resilient_parsing:  # a shell's completion must not get an error
                return None
            raise UsageError(f"no such command {cmd_name!r}{hint}")
        module, attribute = entry[0].split(":")
        with _Importing():
            command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _commands().items()])

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run a command; print an error as one line on stderr and exit with its status."""
        _open_standard_streams()
        try:
            sys.exit(super().main(*args, **{**kwargs, "standalone_mode": False}) or 0)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except click.ClickException as error:
            _fail(error.format_message().removesuffix(".") + _source_of(error), error.exit_code)
        except SsdError as error:
            _fail(str(error), error.exit_code)
        except click.Abort as error:
            sys.exit(getattr(error.__cause__, "exit_code", 130))  # click replaces an interrupt by Abort
        except BrokenPipeError:
            # The reader of our output has left: nothing more can be written, not even by the interpreter at its exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except UnicodeEncodeError as error:  # bytes of an argument, kept as surrogates
            _fail(f"{error.object!r} is not UTF-8", 2)
        except MemoryError as error:
            _fail(out_of_memory(error), 1)
        except OSError as error:
            _fail(f"{error.filename or 'output'}: {error.strerror}", 1)


def _open_standard_streams() -> None:
    """Open closed standard streams on /dev/null: pipes and files opened later would get their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))


def _source_of(error: click.ClickException) -> str:
    param, context = getattr(error, "param", None), getattr(error, "ctx", None)
    source = None if param is None or context is None else context.get_parameter_source(param.name)
    words = {
        "ENVIRONMENT": f" ({getattr(param, 'envvar', '')})",
        "DEFAULT_MAP": " (in the file of --config)",
    }
    return "" if source is None else words.get(source.name, "")


def _fail(message: str, exit_code: int) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(exit_code)


def _show_version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from ssd.system.version import described

        click.echo(f"ssd {described()}")
        ctx.exit()


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version."
)
def main() -> None:
    """Run an inference engine for speculative speculative decoding: the tokens of plain decoding, sooner."""


if __name__ == "__main__":
    main()
