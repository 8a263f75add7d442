"""The deployment of replicas on Ray Serve, and its autoscaling.

client -> Serve's HTTP proxy -> Ingress -> PrefixRouter -> Replica -> its engine's HTTP"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ssd.config import gpus
from ssd.errors import SsdError, UsageError
from ssd.launch.options import EngineOptions
from ssd.launch.server import ServerOptions, resolve_server
from ssd.plugins.ray.ingress import Ingress
from ssd.plugins.ray.ranks import connected
from ssd.plugins.ray.replica import OPEN, Replica
from ssd.system import registered

_APPLICATION = "ssd"
_HEALTH_S = 2.0

_Count = Annotated[int, Meta(ge=1, le=1000)]


class ReplicaOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table [replicas] of a configuration file: `min` to `max` replicas, and the size of each.

    `load`: requests that each should have, running and waiting. `cpus`: of a replica, or of each rank."""

    min: _Count = 1
    max: _Count = 1
    load: Annotated[float, Meta(gt=0, le=65536)] = 8.0
    cpus: _Count = 1


def desired_replicas(context: Any) -> tuple[float, dict[str, Any]]:
    """Return the number of replicas that the open requests need; Serve adds bounds and delays."""
    open_requests = sum(context.aggregated_metrics.get(OPEN, {}).values())
    return open_requests / context.config.get_target_ongoing_requests(), {}


def replica_bundles(engine: EngineOptions, cpus: int) -> list[dict[str, float]]:
    """Return the resources that a replica needs of each machine that it may be spread over."""
    first, draft = gpus.number(engine.device), gpus.number(engine.draft_device or "cpu")
    here: dict[str, float] = {"CPU": cpus}
    if devices := {*gpus.of_ranks(engine.device, engine.ranks_here), *(() if draft is None else (draft,))}:
        here["GPU"] = len(devices)
    each = {"CPU": float(cpus)} if first is None else {"CPU": 1.0, "GPU": 1.0}
    return [here, *(dict(each) for _ in range(engine.ranks_here, engine.tensor_parallel_size))]


def checked(engine: EngineOptions, server: ServerOptions, table: object) -> ReplicaOptions:
    """Return the options in the table [replicas]. Raises UsageError for an option of one engine."""
    for name, given in (
        ("--no-http", not server.http),
        ("--uds", server.uds is not None),
        ("--ssl-certfile", server.ssl_certfile is not None),
        ("--zmq-bind", server.zmq_bind is not None),
        ("--draft-bind", server.draft_bind is not None),
    ):
        if given:
            raise UsageError(f"{name} is for one engine, not for replicas")
    if server.port == 0:
        raise UsageError("--port 0: replicas need a port that is known")
    resolve_server(server, engine.target)
    registered.check(registered.EXECUTORS, "--executor", engine.executor, ("local",))
    try:
        found = msgspec.convert(table, ReplicaOptions)
    except msgspec.ValidationError as error:
        raise UsageError(f"[replicas]: {error}") from None
    if found.max < found.min:
        raise UsageError(f"[replicas]: max {found.max} is less than min {found.min}")
    return found


def deploy(engine: EngineOptions, server: ServerOptions, table: object) -> str:
    """Start the replicas, or replace running ones by turns; return HTTP's address when they answer."""
    replicas = checked(engine, server, table)
    with ExitStack() as held:
        connected(held, logs=False)
        from ray import serve
        from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        bundles, most = replica_bundles(engine, replicas.cpus), server.max_open_requests
        replica = serve.deployment(Replica).options(
            ray_actor_options={"num_cpus": bundles[0]["CPU"], "num_gpus": bundles[0].get("GPU", 0)},
            placement_group_bundles=bundles if len(bundles) > 1 else None,
            placement_group_strategy="PACK" if len(bundles) > 1 else None,
            max_ongoing_requests=most,
            graceful_shutdown_timeout_s=engine.shutdown_timeout,
            health_check_period_s=_HEALTH_S,
            autoscaling_config=AutoscalingConfig(
                min_replicas=replicas.min,
                max_replicas=replicas.max,
                target_ongoing_requests=replicas.load,
                policy=AutoscalingPolicy(policy_function=desired_replicas),
            ),
            request_router_config=RequestRouterConfig(
                request_router_class="ssd.plugins.ray.router:PrefixRouter",
                request_router_kwargs={"slack": replicas.load},
            ),
        )
        on_head = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}  # beside the proxy
        ingress = serve.deployment(serve.ingress()(Ingress)).options(
            ray_actor_options=on_head, max_ongoing_requests=2 * most * replicas.max
        )
        serve.start(proxy_location="HeadOnly", http_options={"host": server.host, "port": server.port})
        try:
            bound = replica.bind(msgspec.json.encode(engine), msgspec.json.encode(server))
            serve.run(ingress.bind(bound, server.max_body_bytes), name=_APPLICATION, route_prefix="/")
        except RuntimeError as error:
            raise SsdError(f"Ray Serve: {cause_of(serve.status()) or error}") from None
    return f"http://{server.host}:{server.port}"


def cause_of(status: Any) -> str:
    """Return the error of an engine that could not start, or ""."""
    application = status.applications.get(_APPLICATION)
    said = [] if application is None else [deployment.message for deployment in application.deployments.values()]
    causes = [line for message in said for line in message.splitlines() if line.startswith("ssd.errors.")]
    return causes[-1].partition(": ")[2] if causes else ""


def stop() -> None:
    """End the replicas after their open requests, and Serve if it runs nothing else."""
    with ExitStack() as held:
        connected(held, logs=False)
        from ray import serve

        if set(serve.status().applications) <= {_APPLICATION}:
            serve.shutdown()
        else:
            serve.delete(_APPLICATION)
