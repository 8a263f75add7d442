"""`ssd launch`, also `ssd serve`: an engine that stays up. Options: how clients reach it, a configuration file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import click
from click.core import ParameterSource
from msgspec.structs import replace

from ssd.cli.options import GroupedCommand, config_option, engine_options, with_options
from ssd.cli.session import loading, process_setup
from ssd.config.engine import EngineConfig
from ssd.errors import SsdError, UsageError
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.server import ServerOptions
from ssd.launch.supervisor import Engine

_SERVER = {
    "http": "Serve HTTP beside ZeroMQ.",
    "host": "Address that HTTP listens on.",
    "port": "Its port; 0: any free one.",
    "uds": "Listen on this Unix socket instead.",
    "api_key_file": "File with the keys that clients must show, one a line; only its owner may read it.",
    "api_key": "A key that clients must show. Repeatable; better SSD_API_KEY, which no list of processes shows.",
    "ssl_certfile": "Serve HTTPS with the certificates in this PEM file.",
    "ssl_keyfile": "PEM file with the private key. Default: it is in --ssl-certfile.",
    "allow_origin": "Let web pages of this origin ask, as https://app.example; *: of any. Repeatable.",
    "allowed_host": "Another host name that HTTP without keys answers to, as of a proxy. Repeatable.",
    "zmq_bind": "Let ZeroMQ clients of other machines in at this address, as tcp://0.0.0.0:5555.",
    "zmq_keys": "Folder of `ssd keys` with the engine's key and the list of clients.",
    "draft_bind": "Let a draft on another machine (ssd draft) connect at this address, as tcp://0.0.0.0:5556.",
    "draft_keys": "Folder of `ssd keys` with the list of those drafts, which read prompts.",
    "draft_prompts": "Which requests such a draft reads: all, or its own, those of the client key with its name.",
    "insecure": "Let other machines in without keys.",
    "served_model_name": "The model's name for clients. Repeatable. Default: --target; of ssd edge the cloud's name.",
    "metrics_compat": "Give the metrics under vLLM's names, too.",
    "otlp_traces_endpoint": "Send a span a request to this collector, as http://localhost:4318/v1/traces.",
    "strict_fields": "Refuse HTTP bodies with unknown fields instead of ignoring these.",
    "cache_report": "Tell clients how much of a prompt was cached.",
    "ui": "Serve a chat page at / over HTTP.",
    "tool_call_parser": "How the model says tool calls: auto (as its chat template fits), none (plain JSON), hermes, "
    "llama3_json, mistral, pythonic, or a plugin's name.",
    "reasoning_parser": "How it marks its thoughts: auto, none, think, mistral, or a plugin's name.",
    "max_open_requests": "Most requests that run or wait; more are refused (429).",
    "max_n": "Most choices of one prompt.",
    "max_prompts": "Most prompts of one HTTP request.",
    "max_body_bytes": "Largest HTTP body.",
    "max_header_bytes": "Largest headers of an HTTP request, together.",
    "max_header_lines": "Most headers of an HTTP request.",
    "slow_reader_tokens": "Tokens a client may leave unread before it is cut off.",
    "slow_reader_seconds": "Seconds a client may leave tokens unread.",
    "max_grammar_bytes": "Longest JSON schema, regular expression or grammar of a request.",
    "grammar_timeout": "Seconds of processor time that compiling one may take.",
}
_EXAMPLES = """
ssd launch smollm2
ssd launch ./model.gguf --draft ./small.gguf --port 8080
ssd launch Qwen/Qwen3-8B --device cuda --host 0.0.0.0 --api-key-file keys.txt
"""


def server_options(without: Collection[str] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the server options except `without` to a command, which gets them as `server`, a `ServerOptions`."""
    helps = {name: text for name, text in _SERVER.items() if name not in without}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(**values: Any) -> Any:
            server = ServerOptions(**{name: values.pop(name) for name in helps})
            return function(server=server, **values)

        return with_options(call, helps, ServerOptions())

    return decorate


@click.command(cls=GroupedCommand, examples=_EXAMPLES)
@click.argument("model", required=False)
@engine_options
@server_options()
@config_option
@click.option("--dry-run", is_flag=True, help="Print the configuration that would be used, as JSON, and end.")
@click.pass_context
def launch(
    context: click.Context, model: str | None, engine: EngineOptions, server: ServerOptions, dry_run: bool
) -> None:
    """Start an engine for MODEL (or --target) and keep it up.

    Prints where it is served: `http: URL`, `zmq: ADDRESS` of --zmq-bind, and `ready: ADDRESS` last. Ctrl-C or SIGTERM
    lets open requests finish within --shutdown-timeout, then ends; a second one ends at once."""
    if model is not None:
        if context.get_parameter_source("target") is ParameterSource.COMMANDLINE:
            raise UsageError("give the target as MODEL or as --target, not as both")
        engine = replace(engine, target=model)
    config = resolve(engine, server)
    if dry_run:
        import msgspec

        shown = replace(config, server=replace(config.server, api_keys=("...",) * len(config.server.api_keys)))
        click.echo(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode())
        return
    serve(config)


def serve(config: EngineConfig) -> None:
    """Run an engine, and print its addresses, until it is interrupted or ends by itself."""
    running = Engine(config)
    ready = False
    with process_setup():
        try:
            with loading(running):
                running.start()
            ready = True
            if running.url is not None:
                click.echo(f"http: {running.url}")
            if config.server.zmq_bind is not None:
                click.echo(f"zmq: {config.server.zmq_bind}")
            if config.link is not None:
                click.echo(f"draft: {config.link.bind}")
            click.echo(f"ready: {running.address}")
            running.wait()
        except KeyboardInterrupt:
            if not ready:
                raise
            click.echo("draining", err=True)
            running.stop()
            if running.failure is None:
                return
        finally:
            running.stop(drain=0.0)
    raise running.failure or SsdError("the engine ended by itself")
