"""The frontend: requests in, text out. It serves clients over ZeroMQ and HTTP and never imports torch."""
