"""Tiny random checkpoints, written by transformers itself, so that a test needs neither the internet nor time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssd.config.params import DRAFT_REACH, MAX_LOOKAHEAD
from ssd.execution.runner import Runner
from ssd.execution.states import StateRoom
from ssd.models import registry
from ssd.models.checkpoint import inspect
from ssd.models.pairs import SHARED, borrowed
from ssd.models.quantization import QUANTIZATION
from ssd.models.weights import from_checkpoint

CPU = torch.device("cpu")
MAX_POSITION = 256
# The states of 32 sequences, target's or draft's.
ROOM = StateRoom(32, DRAFT_REACH, 32 * 32, MAX_LOOKAHEAD + 1)
# A vocabulary that is a multiple of nothing, two key heads for four query heads, a feed-forward of an odd width.
SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def model(kind: str, directory: Path, *, seed: int = 0, std: float = 0.2, shards: bool = False, **config: Any) -> Path:
    """A random checkpoint of the `model_type` in `directory`; `config` overrides SIZES and names any other field of
    transformers' config of it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {name: value for name, value in SIZES.items() if hasattr(AutoConfig.for_model(kind), name)}
    known = AutoConfig.for_model(kind, **sizes | config)
    if kind == "gpt2":
        known.eos_token_id = 2  # its own is beyond a small vocabulary
    return _write(AutoModelForCausalLM.from_config(known, dtype=torch.float32), directory, seed, std, shards)


def llama(directory: Path, **options: Any) -> Path:
    """A random Llama; for `options` see `model`."""
    return model("llama", directory, **options)


def qwen3(directory: Path, **options: Any) -> Path:
    """A random dense Qwen3; for `options` see `model`."""
    return model("qwen3", directory, **{"head_dim": 8} | options)


def _write(model: Any, directory: Path, seed: int, std: float, shards: bool) -> Path:
    """Weights of `std` make top-2 gaps healthy; biases and norms are random too, so that none can be forgotten."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        mean = 1.0 if name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")) else 0.0
        parameter.data = mean + std * torch.randn(parameter.shape, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(1 + std * float(torch.randn((), generator=generator)))
    model.save_pretrained(directory, max_shard_size="20KB" if shards else "1GB")
    return directory


def edit(directory: Path, **fields: Any) -> Path:
    """Change fields of config.json."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return directory


def noisy_copy(source: Path, directory: Path, noise: float, seed: int = 1) -> Path:
    """The checkpoint (one file) with every weight moved by `noise` x N(0, 1): a draft that is right now and then."""
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(seed)
    directory.mkdir()
    shutil.copy(source / "config.json", directory)
    tensors = load_file(source / "model.safetensors")
    moved = {name: t + noise * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}
    save_file(moved, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def renumbered(source: Path, directory: Path, lacking: int = 20, more: int = 9, seed: int = 5) -> Path:
    """The model and the byte-level BPE tokenizer of `source` with other ids, without the last `lacking` tokens, with
    `more` tokens of its own, and with another name of a special one."""
    from safetensors.torch import load_file, save_file

    directory.mkdir()
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    kept = sorted(vocabulary, key=vocabulary.__getitem__)[: len(vocabulary) - lacking]
    size, generator = len(kept) + more, torch.Generator().manual_seed(seed)
    ids = torch.randperm(size, generator=generator).tolist()
    renamed = {"<|im_start|>": "<|begin|>"}
    new = {renamed.get(token, token): ids[index] for index, token in enumerate(kept)}
    tokenizer["model"]["merges"] = [pair for pair in merges if "".join(pair) in new]
    tokenizer["model"]["vocab"] = new | {f"ĠmineĠ{index}": number for index, number in enumerate(ids[len(kept) :])}
    for token in tokenizer["added_tokens"]:
        token["content"] = renamed.get(token["content"], token["content"])
        token["id"] = new[token["content"]]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("embed_tokens.weight", "embed_tokens_per_layer.weight", "lm_head.weight", "wte.weight")):
            rows = torch.randn(size, tensor.shape[1], generator=generator)
            rows[ids[: len(kept)]] = tensor[[vocabulary[token] for token in kept]]
            tensors[name] = rows
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(source / "config.json", directory)
    return edit(directory, vocab_size=size, eos_token_id=None, bos_token_id=None)


def whole_draft(draft: Path, target: Path, directory: Path) -> Path:
    """A draft with the tensors it shares with its target written out, for readers that know of no sharing."""
    from safetensors.torch import save_file

    checkpoint = borrowed(inspect(draft), inspect(target))
    weights = from_checkpoint(checkpoint, torch.float32, CPU)
    sizes = {name: info.shape for name, info in checkpoint.tensors.items()}
    tensors = {name: weights(name, *shape) for name, shape in sizes.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {key: value for key, value in checkpoint.config.items() if key not in (SHARED, QUANTIZATION)}
    (directory / "config.json").write_text(json.dumps(config))
    shutil.copy(target / "tokenizer.json", directory)
    return directory


def tokenizer(directory: Path, vocab_size: int = 300) -> Path:
    """Give a checkpoint a byte-level BPE tokenizer of at most `vocab_size` tokens and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet)
    bpe.train_from_iterator([__doc__, _write.__doc__, noisy_copy.__doc__], trainer)
    bpe.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return directory


def runner(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    *,
    pages: int = 512,
    page_size: int = 4,
    deterministic: bool = False,
    int8: bool = False,
) -> Runner:
    """The engine's own way from a folder to logits."""
    model = registry.load(inspect(directory), dtype, CPU, MAX_POSITION, int8=int8)
    return Runner(model, pages, page_size, deterministic, state_room=ROOM)


def oracle(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of the same checkpoint; of a GGUF, with the tensors that we read, in the model's own type."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (directory / "model.gguf").is_file():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()
    checkpoint, config = inspect(directory), AutoConfig.from_pretrained(directory)
    read = from_checkpoint(checkpoint, dtype, CPU)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    found = model.load_state_dict({name: read(name, *t.shape) for name, t in checkpoint.tensors.items()}, strict=False)
    assert not found.unexpected_keys and set(found.missing_keys) <= {"lm_head.weight"}
    return model.eval()


@torch.inference_mode()
def oracle_logits(model: Any, token_ids: list[int]) -> Tensor:
    """[len(token_ids), vocab_size] of a model of `oracle`, in one plain forward."""
    logits: Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


def token_ids(count: int, seed: int, vocab_size: int = SIZES["vocab_size"]) -> list[int]:
    """Random tokens."""
    ids: list[int] = torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids
