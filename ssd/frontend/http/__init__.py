"""The OpenAI-compatible HTTP endpoint: plain ASGI under uvicorn. Needs the extra `ssd[http]`."""
