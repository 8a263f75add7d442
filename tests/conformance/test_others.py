"""Other programs that speak OpenAI's interface: litellm, llm, lm-eval, guidellm, schemathesis."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ssd.models import hub

_BIN = Path(sys.executable).parent


def run(*command: str, **environment: str) -> str:
    """What a program prints; it must end well."""
    done = subprocess.run(
        [str(_BIN / command[0]), *command[1:]], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_litellm(server: str) -> None:
    import litellm

    given = {
        "model": "openai/smollm2",
        "messages": [{"role": "user", "content": "Say hello."}],
        "api_base": f"{server}/v1",
        "api_key": "none",
        "max_tokens": 12,
        "temperature": 0,
    }
    whole = litellm.completion(**given)
    parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**given, stream=True)]
    assert "".join(parts) == whole.choices[0].message.content != ""


def test_llm(server: str, tmp_path: Path) -> None:
    models = f"- model_id: pair\n  model_name: smollm2\n  api_base: {server}/v1\n"
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    answer = run(
        "llm", "-m", "pair", "--key", "none", "-o", "temperature", "0", "-o", "max_tokens", "12", "Say hello.",
        LLM_USER_PATH=str(tmp_path),
    )  # fmt: skip
    assert answer.strip()


def test_lm_eval_scores_with_our_logprobs(server: str, tmp_path: Path) -> None:
    """`local-completions` asks for the log-probabilities of echoed prompts; the likelier answers must win."""
    rows = [
        ("The sky is", ["blue", "spoon"]),
        ("Two plus two is", ["four", "window"]),
        ("The capital of France is", ["Paris", "banana"]),
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"q": q, "choices": choices, "gold": 0}) + "\n" for q, choices in rows))
    task = {
        "task": "tiny",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "tiny.yaml").write_text(json.dumps(task))  # JSON is YAML
    arguments = (
        f"model=smollm2,base_url={server}/v1/completions,num_concurrent=2,max_retries=1,tokenized_requests=True,"
        f"tokenizer={hub.ensure('smollm2')},tokenizer_backend=huggingface,max_length=1024"
    )
    run(
        "lm_eval", "--model", "local-completions", "--model_args", arguments, "--tasks", "tiny",
        "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"),
        HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hf"),
    )  # fmt: skip
    (found,) = (tmp_path / "out").rglob("results_*.json")
    accuracy = json.loads(found.read_text())["results"]["tiny"]["acc,none"]
    assert math.isclose(accuracy, 1.0)


def test_guidellm_measures(server: str, tmp_path: Path) -> None:
    run(
        "guidellm", "run", "--backend", f"kind=openai_http,target={server}",
        "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4",
        "--tokenizer", f"kind=huggingface_auto,model={hub.ensure('smollm2')}",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "--output", f"kind=json,path={tmp_path / 'out.json'}", "--disable-console",
        HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hf"),
    )  # fmt: skip
    (benchmark,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), requests["errored"]) == (4, [])
    assert {request["output_metrics"]["text_tokens"] for request in requests["successful"]} == {8}


@pytest.mark.mock
def test_schemathesis_finds_no_server_error(mock_server: str) -> None:
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    run(
        "schemathesis", "run", f"{mock_server}/openapi.json", "--mode", "all", "--checks", checks,
        "--max-examples", "40", "--phases", "examples,coverage,fuzzing", "--generation-deterministic",
    )  # fmt: skip
