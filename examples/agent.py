"""An agent that edits files by tool calls, over HTTP: the second time it takes a third of the rounds.

    ssd serve smollm2                                # in another shell
    python examples/agent.py http://127.0.0.1:8000

Agents say the same again and again: paths, tool calls, files with one line changed. The engine remembers what requests
of a key said and proposes it again (docs/serving.md, "The suffix memory"). The job is done three times: without the
memory (`"store": false`), then twice with it. All three get the same calls: a proposal never changes an answer.

The built-in model is too small to plan, so the program says which tool comes next. The arguments are the model's.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from typing import Any

FILES = {
    "area.py": "def area(width, height):\n    return width * height\n",
    "mean.py": "def mean(values):\n    return sum(values) / len(values)\n",
    "clamp.py": "def clamp(value, low, high):\n    return max(low, min(value, high))\n",
}
STEPS = [
    ("read_file", "Read {path}."),
    ("write_file", "Write {path} again, with a docstring in the function."),
    ("run_tests", "Run the tests of {path}."),
    ("write_file", "Write {path} again, with type hints."),
    ("run_tests", "Run the tests of {path}."),
]
PATH = {"type": "string", "maxLength": 20}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "read_file": {"path": PATH},
    "write_file": {"path": PATH, "content": {"type": "string", "maxLength": 300}},
    "run_tests": {"path": PATH, "verbose": {"type": "boolean"}},
}


def tool(name: str) -> dict[str, Any]:
    """Describe a tool as OpenAI's API wants it."""
    schema = {"type": "object", "properties": ARGUMENTS[name], "required": [*ARGUMENTS[name]]}
    schema["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def ask(url: str, messages: list[dict[str, Any]], name: str, store: bool) -> dict[str, Any]:
    """Return the whole answer of the server, a call of the tool `name`."""
    body = {
        "messages": messages,
        "tools": [tool(name) for name in ARGUMENTS],
        "tool_choice": {"type": "function", "function": {"name": name}},
        "max_completion_tokens": 200,
        "temperature": 0,
        "return_metrics": True,
        "store": store,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def job(url: str, store: bool) -> list[str]:
    """Edit every file; print the speed, and return the arguments of all calls."""
    said, tokens, sources, rounds, began = list[str](), 0, dict[str, int](), 0, time.perf_counter()
    for path, content in FILES.items():
        messages: list[dict[str, Any]] = [{"role": "system", "content": "You edit files by calling tools."}]
        for name, task in STEPS:
            messages.append({"role": "user", "content": task.format(path=path)})
            answer = ask(url, messages, name, store)
            call = answer["choices"][0]["message"]["tool_calls"][0]
            said.append(call["function"]["arguments"])
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            result = content if name == "read_file" else "passed" if name == "run_tests" else "written"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            tokens += answer["usage"]["completion_tokens"]
            figures = answer["metrics"]["speculative_decoding"]
            rounds += figures["num_spec_steps"]
            for source, count in figures["accepted_by_source"].items():
                sources[source] = sources.get(source, 0) + count
    seconds = time.perf_counter() - began
    accepted = ", ".join(f"{source} {count}" for source, count in sources.items())
    print(f"{len(said)} calls, {tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tok/s, {rounds} rounds")
    print(f"    accepted: {accepted or 'nothing'}")
    return said


def main(url: str) -> None:
    print("without the memory:")
    first = job(url, store=False)
    print("with it, for the first time:")
    second = job(url, store=True)
    print("with it, again:")
    third = job(url, store=True)
    print("the same calls each time" if first == second == third else "OTHER calls")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/agent.py URL")
    main(sys.argv[1].rstrip("/"))
