"""`ssd models NAME`: what a checkpoint is, by its headers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from ssd.cli.main import main
from ssd.models import pairs, registry
from tests.models import ggufs, tiny
from tests.models.knobs import FAMILIES


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["models", *map(str, arguments)])


def described(*arguments: str | Path) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_folder(tmp_path: Path) -> None:
    knobs = FAMILIES["llama yarn rope"][1] | {"num_hidden_layers": 3}
    directory = tiny.tokenizer(tiny.llama(tmp_path, **knobs))
    tensors = load_file(directory / "model.safetensors")
    found = described(directory, "--max-num-seqs", "3", "--max-model-len", "50")
    numbers = sum(tensor.numel() for tensor in tensors.values())
    assert (found["model_type"], found["family"], found["chat_template"]) == ("llama", "built in", True)
    assert (found["parameters"], found["tensors"]) == (numbers, {"F32": len(tensors)})
    assert (found["disk_bytes"], found["bits_per_weight"], found["weight_bytes"]) == (4 * numbers, 32.0, 4 * numbers)
    sizes = [found[name] for name in ("layers", "width", "heads", "key_heads", "head_dim", "vocabulary", "context")]
    assert sizes == [3, 32, 4, 2, 8, 131, 256]
    assert "yarn, factor 4.0" in found["rope"]
    assert found["cache_bytes"] == 3 * 50 * 2 * 3 * 2 * 8 * 4  # keys and values of 3 layers, 2 heads of 8 numbers


def test_as_text(tmp_path: Path) -> None:
    told = run(tiny.llama(tmp_path, **FAMILIES["llama longrope"][1])).output
    assert "llama (built in)" in told and "longrope" in told and "F32" in told and "chat template" in told


@pytest.mark.usefixtures("own_cache")
def test_a_gguf(tmp_path: Path) -> None:
    source = tiny.tokenizer(tiny.llama(tmp_path / "source", vocab_size=300))
    ggufs.write(tmp_path / "x.gguf", "Q4_1", source)
    found = described(tmp_path / "x.gguf")
    assert found["model_type"] == "llama" and found["tensors"] == {"Q4_1": 16, "F32": 5}
    assert 5 < found["bits_per_weight"] < 5.5


def test_families_that_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "fallback", lambda: None)
    assert described(tiny.edit(tiny.llama(tmp_path), model_type="warp"))["family"].startswith("not supported: nothing")
    assert "any other" not in run().output


def test_a_draft_that_fits_and_one_that_does_not(tmp_path: Path) -> None:
    target = tiny.tokenizer(tiny.llama(tmp_path / "target", vocab_size=300))
    for draft in (target, tiny.renumbered(target, tmp_path / "another vocabulary")):
        found = described(target, "--draft", draft)
        assert found["draft_fits"] is True and found["draft_why_not"] is None
    bound = tiny.edit(tiny.renumbered(target, tmp_path / "bound"), **{pairs.SHARED: ["model.embed_tokens.weight"]})
    found = described(target, "--draft", bound)
    assert found["draft_fits"] is False and "with the same tokenizer" in found["draft_why_not"]
    assert "does not fit: " in run(target, "--draft", bound).output
