"""The OpenAI-compatible HTTP interface: plain ASGI under uvicorn.

To add an endpoint:

    1. bodies.py: a struct for the JSON that it takes, if any; decoding.py refuses and ignores by it
    2. answers.py: a struct for the JSON that it returns
    3. endpoints.py: a function that reads the `Exchange` and replies, and its `Route` in `ROUTES`

A request goes through server.py (accepts connections), connection.py (reads heads and bodies), app.py (dispatches),
endpoints.py and service.py (decode bodies), and for completions through generation.py (collects or streams) and
chat.py or completions.py (the JSON)."""
