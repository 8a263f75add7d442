"""Ray: ranks of a target on a cluster (`--executor ray`), and replicas of an engine behind Ray Serve."""

COMMANDS = {"serve-ray": ("ssd.plugins.ray.command:serve_ray", "Start replicas of an engine on a Ray cluster.")}
