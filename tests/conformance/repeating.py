"""A tiny checkpoint that calls tools, then answers: each token has one successor, whatever came before it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE

TEMPLATE = """\
{{ '' if enable_thinking }}{{ tools | length if tools }}
{%- for message in messages %}{{ message.role }} {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}
{{- '<answer>' if messages[-1].role == 'tool' else '<assistant>' }}"""
ANSWERS = {
    "<assistant>": [
        *("<think>", "The user", " wants", " weather.", "</thi", "nk>", "\n\n", "Let me", " see.\n", "<tool_", "call>"),
        *('{"name"', ': "get_', 'weather",', ' "arguments": {"ci', 'ty": ', '"Ro', 'me"}}', "</tool_call>", "\n"),
        *("<tool_call>\n", '{"name": "', "get_weather", '", "arguments"', ': {"city":', ' "Oslo"}', "}\n</tool_call>"),
    ],
    "<answer>": ["It", " is", " sunny", "."],
}
# One call, in the tokens in which a tokenizer writes its text: those that a grammar forces.
STRICT_ANSWERS = {
    "<assistant>": [
        *("<think>", "The user", " wants", " weather.", "</think>", "\n\n", "Let me", " see.\n", "<tool_call>"),
        *('\n{"name": "get_weather", "arguments": ', '{"city": ', '"Rome"}', "}\n</tool_call>"),
    ],
    "<answer>": ["It", " is", " sunny", "."],
}

_WIDTH = 384  # of hidden states, and of the vocabulary
_START, _END = "<start>", "<end>"


def repeating(directory: Path, answers: Mapping[str, Sequence[str]] = ANSWERS) -> Path:
    """Writes a Llama in `directory` that says one of `answers` after the token that is its key.
    All pieces are different. The chat template ends a prompt with a key: it depends on who has spoken last."""
    pieces = [_START, _END, *answers, *itertools.chain.from_iterable(answers.values())]
    assert len(set(pieces)) == len(pieces) <= _WIDTH - 256
    number = {piece: index for index, piece in enumerate(pieces)}
    head = torch.zeros(_WIDTH, _WIDTH)
    for key, answer in answers.items():
        said = [key, *answer, _END]
        for piece, following in itertools.pairwise(said):
            head[number[following], number[piece]] = 10.0  # certain at temperature 1, too
    directory.mkdir()
    _write_weights(directory, head)
    _write_tokenizer(directory, pieces)
    return directory


def _write_weights(directory: Path, head: torch.Tensor) -> None:
    """Attention and feed-forward add nothing, so the last hidden state is the last token's embedding."""
    nothing = torch.zeros(_WIDTH, _WIDTH)
    layer = {f"self_attn.{name}_proj": nothing.clone() for name in "qkvo"}
    layer |= {f"mlp.{name}_proj": nothing.clone() for name in ("gate", "up", "down")}
    layer |= {name: torch.ones(_WIDTH) for name in ("input_layernorm", "post_attention_layernorm")}
    weights = {f"model.layers.0.{name}.weight": tensor for name, tensor in layer.items()}
    weights |= {"model.embed_tokens.weight": torch.eye(_WIDTH), "model.norm.weight": torch.ones(_WIDTH)}
    save_file({**weights, "lm_head.weight": head}, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _WIDTH,
        "intermediate_size": _WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": _WIDTH,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))


def _write_tokenizer(directory: Path, pieces: Sequence[str]) -> None:
    """Text that is no piece is a token for each byte."""
    bytes = {f"<0x{byte:02X}>": len(pieces) + byte for byte in range(256)}
    tokenizer = Tokenizer(BPE({piece: index for index, piece in enumerate(pieces)} | bytes, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces[2:]])
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in pieces[:2]])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
