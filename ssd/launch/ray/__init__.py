"""`ssd serve-ray`: replicas of an engine, as an application of Ray Serve."""
