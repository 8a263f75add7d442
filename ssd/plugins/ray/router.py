"""`Affinity` as a router of Ray Serve, found by name. Only this file needs Ray when imported."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter

from ssd.plugins.ray.affinity import Affinity


class PrefixRouter(RequestRouter):
    """The router of one handle, made by Serve. A request's first argument has its `prompt`."""

    def initialize_state(self, slack: float) -> None:
        self._affinity = Affinity(slack)

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        prompt = ""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # for the case that all replicas are full
            prompt = pending_request.args[0].prompt
        found = {replica.replica_id: replica for replica in candidate_replicas}
        requests = {name: self.replica_queue_len_cache.get(name) or 0 for name in found}
        return [[found[name]] for name in self._affinity.ranked(prompt, requests)]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        self._affinity.sent(pending_request.args[0].prompt, replica_id)
