"""Runs families without a file here: transformers' own model, with the engine's attention.

On loading, a short text in two parts must give the logits of transformers' own attention; `whole.py` gets models that
fail. Code of a checkpoint is never run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssd.errors import UsageError
from ssd.layers.attention import PLAIN, Scores, attend, sinks_of
from ssd.layers.norm import Residual
from ssd.layers.recurrent import Recurrence
from ssd.models.checkpoint import Checkpoint
from ssd.models.interface import ForwardContext, Shape
from ssd.models.layer_kinds import FULL, SLIDING
from ssd.models.pairs import DRAFT_VOCAB, SHARED
from ssd.models.quantization import QUANTIZATION
from ssd.models.stored import check_finite, check_type
from ssd.plugins.fallback.installed import HOW_TO_INSTALL, installed_transformers

_NAME = "ssd"  # the attention below is registered in transformers under this name
_CUT = 7  # tokens of the first part of the text tried on loading
# Scalings whose frequencies depend on the length of the text: cached keys would have to be rotated again.
_MOVING_ROPE = {"dynamic", "longrope"}
_KNOWN_LAYERS = {FULL, SLIDING}


class Unpaged(UsageError):
    """The engine's paged attention cannot run a model, whose weights and config are sound."""


def load(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, max_position: int, dummy: bool
) -> PagedFallback:
    """Load transformers' model over paged attention; raise `UsageError` with the cause if it cannot run."""
    with told():
        model = built(checkpoint, dtype, device, dummy, _NAME)
    with told(Unpaged):
        return PagedFallback(model, dtype, device, max_position)


@contextmanager
def told(kind: type[UsageError] = UsageError) -> Iterator[None]:
    """Raise the errors of transformers' code, which may raise anything, as `kind`."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        first, *_ = str(error).splitlines() or [""]
        raise kind(f"transformers {installed_transformers()} cannot run it: {type(error).__name__}: {first}") from error


def built(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, dummy: bool, attention: str | None = None
) -> nn.Module:
    """Return transformers' model of a checkpoint; raise `UsageError` with the cause if it cannot run here.

    `attention`: name of its attention, None for the model's own."""
    if installed_transformers() is None:
        raise UsageError(f"transformers might run it: {HOW_TO_INSTALL}")
    for key in (SHARED, DRAFT_VOCAB):
        if key in checkpoint.config:
            raise UsageError(f"config.json has {key}, which transformers does not know")
    if checkpoint.config.get(QUANTIZATION):
        raise UsageError("quantised weights need a family with a file of its own")
    if (checkpoint.directory / "adapter_config.json").exists():
        raise UsageError("adapter_config.json: adapters are not loaded")
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        config = AutoConfig.from_pretrained(checkpoint.directory, trust_remote_code=False, local_files_only=True)
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except (KeyError, ValueError, TypeError, OSError) as error:
        raise UsageError(
            f"transformers {installed_transformers()} does not know it as a causal language model"
        ) from error
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if part.get("rope_type") in _MOVING_ROPE:
            raise UsageError(f"rope scaling {part['rope_type']!r} is not supported")
    if attention == _NAME:
        _check(kind, config)
    return _build(kind, config, checkpoint, dtype, dummy, attention).to(device).eval().requires_grad_(False)


def _check(kind: Any, config: Any) -> None:
    if not getattr(kind, "_supports_attention_backend", False):
        raise Unpaged(f"transformers' {kind.__name__} does not attend through its attention interface")
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := kinds - _KNOWN_LAYERS:
        raise Unpaged(f"layers of {min(unknown)!r} are not supported")
    if getattr(config, "attention_chunk_size", None):
        raise Unpaged("attention_chunk_size is not supported")


def _build(
    kind: Any, config: Any, checkpoint: Checkpoint, dtype: torch.dtype, dummy: bool, attention: str | None
) -> nn.Module:
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attention)
    if dummy:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same in every process
            model: nn.Module = kind._from_config(config, dtype=dtype, attn_implementation=attention)
        return model
    for name, tensor in checkpoint.tensors.items():
        if name.endswith(".weight"):  # other tensors, such as the masks of old checkpoints, are not weights
            check_type(name, tensor)
    model, report = kind.from_pretrained(
        checkpoint.directory,
        config=config,
        dtype=dtype,
        attn_implementation=attention,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    for trouble in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, report[trouble])):
            raise UsageError(f"transformers finds tensors {trouble.removesuffix('_keys')}, {names[0]} among them")
    for name, parameter in model.named_parameters():
        check_finite(name, parameter.detach())
    return model


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    context: ForwardContext | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend through the context, with the signature of transformers' attention functions.

    q, k, v [1, heads, n, head_dim] -> [1, n, heads, head_dim]. Zeros fill narrower keys or values. Raises `Unpaged` if
    a layer does not give its index or the context."""
    layer: Any = getattr(module, "layer_idx", None)
    if context is None or not isinstance(layer, int):
        raise Unpaged(f"{type(module).__name__} does not say which layer it is, or hides what it is called with")
    width, scale = max(query.shape[-1], value.shape[-1]), query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (F.pad(x[0].transpose(0, 1), (0, width - x.shape[-1])) for x in (query, key, value))
    sinks = None if s_aux is None else sinks_of(s_aux)
    out = context.attend(layer, q.contiguous(), k, v, Scores(scale, sliding_window, softcap, sinks))
    return out.view(1, q.shape[0], q.shape[1], width)[..., : value.shape[-1]], None


class _Output:
    """A decoder's output with hidden states only: every other attribute or item is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None


def head_of(model: nn.Module, decoder: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function from hidden states [n, width] to logits [n, outputs], by a copy of the model."""
    path = next(name for name, module in model.named_modules() if module is decoder)
    if not path:
        raise Unpaged("its decoder cannot be told from its head")
    *above, last = path.split(".")
    copied: Any = _shallow(model)
    at: nn.Module = copied
    for name in above:
        below = at._modules[name] = _shallow(at.get_submodule(name))
        at = below
    stand_in: Any = _shallow(decoder)  # some heads read their decoder's attributes
    at._modules[last] = stand_in

    def logits(hidden: Tensor) -> Tensor:
        stand_in.forward = lambda *_, **__: _Output(hidden[None])
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
        found: Tensor = copied(input_ids=ids, use_cache=False).logits
        return found[0]

    return logits


def _shallow(module: nn.Module) -> nn.Module:
    other = copy.copy(module)
    other._modules = dict(module._modules)
    return other


def _show_layers(decoder: nn.Module, count: int) -> None:
    """Pass the hidden states of each of `count` layers to `context.keep_hidden`, if layers are found."""
    lists = (module for module in decoder.modules() if isinstance(module, nn.ModuleList) and len(module) == count)
    layers: Any = next(lists, ())

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _show(0, args[0] if args else kwargs.get("hidden_states"), kwargs)

    def after(number: int) -> Any:
        def shows(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            _show(number, out[0] if isinstance(out, tuple) else out, kwargs)

        return shows

    for number, layer in enumerate(layers, 1):
        layer.register_forward_hook(after(number), with_kwargs=True)
    for first in layers[:1]:
        first.register_forward_pre_hook(before, with_kwargs=True)


def _show(layers: int, x: Any, kwargs: dict[str, Any]) -> None:
    context = kwargs.get("context")
    if context is not None and isinstance(x, Tensor):
        context.keep_hidden(layers, x[0])


class PagedFallback:
    def __init__(self, model: Any, dtype: torch.dtype, device: torch.device, max_position: int) -> None:
        self.dtype, self.device = dtype, device
        self._decoder = model.get_decoder()
        self.logits = head_of(model, self._decoder)
        self.shape = self._tried(model, max_position)
        _show_layers(self._decoder, self.shape.layers)

    @torch.inference_mode()
    def _tried(self, model: Any, max_position: int) -> Shape:
        """Return the sizes of the model, seen while it runs a short text; raise UsageError for wrong logits."""
        vocab_size: int = model.get_input_embeddings().num_embeddings
        ids = probe(vocab_size, self.device)
        context = _Probe(self.device)
        parts = []
        for part in (ids[:_CUT], ids[_CUT:]):
            context.extend(len(part))
            parts.append(self.logits(self.forward(part, context)))
        logits = torch.cat(parts)
        context.check(model.config)
        model.set_attn_implementation("eager")
        expected = model(ids[None], use_cache=False).logits[0]
        model.set_attn_implementation(_NAME)
        if not distance(logits, expected) <= tolerance(self.dtype):
            raise Unpaged("transformers' own attention gives other logits: it attends in a way of its own")
        heads, kv_heads, head_dim = context.sizes[0]
        known = getattr(model.config, "max_position_embeddings", None) or max_position
        return Shape(
            vocab_size, logits.shape[1], len(context.sizes), heads, kv_heads, head_dim, min(max_position, known)
        )

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        hidden: Tensor = self._decoder(
            input_ids=token_ids[None], position_ids=context.positions[None], use_cache=False, context=context
        ).last_hidden_state
        return hidden[0]


def probe(vocab_size: int, device: torch.device) -> Tensor:
    """Return the 12 ids of the text that is tried on loading."""
    return torch.arange(1, 13, device=device) * 7919 % vocab_size


def distance(logits: Tensor, expected: Tensor) -> float:
    """Return the mean difference of logits, in standard deviations of the expected ones."""
    return float((logits.double() - expected.double()).abs().mean() / expected.double().std())


def tolerance(dtype: torch.dtype) -> float:
    """Return the `distance` of logits up to which models in `dtype` differ by rounding only."""
    return 1e-3 if torch.finfo(dtype).eps < 1e-4 else 0.1


class _Probe:
    """A context of one sequence that records each layer's heads, key heads, head size and window."""

    def __init__(self, device: torch.device) -> None:
        self.positions = torch.arange(0, device=device)
        self.sizes: dict[int, tuple[int, int, int]] = {}
        self._windows: dict[int, int | None] = {}
        self._past: dict[int, tuple[Tensor, Tensor]] = {}
        self._calls = self._chunks = 0

    def extend(self, count: int) -> None:
        start = int(self.positions[-1]) + 1 if len(self.positions) else 0
        self.positions = torch.arange(start, start + count, device=self.positions.device)
        self._chunks += 1

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Scores = PLAIN) -> Tensor:
        if layer in self._past:
            before = self._past[layer]
            k, v = torch.cat((before[0], k)), torch.cat((before[1], v))
        self._past[layer] = k, v
        self.sizes[layer], self._windows[layer] = (q.shape[1], k.shape[1], q.shape[2]), rule.window
        self._calls += 1
        return attend(q, k, v, q.shape[2] ** -0.5 if rule.scale is None else rule.scale, rule)

    def attend_stored(self, layer: int, q: Tensor, rule: Scores = PLAIN) -> Tensor:
        raise AssertionError("layers of transformers share no keys of ours")

    def views(self) -> None:
        return None

    def cache_places(self, layer: int) -> None:
        return None

    def keep_hidden(self, layers: int, x: Tensor | Residual) -> None:
        pass

    def recur(self, index: int, recurrence: Recurrence, changes: Tensor, queries: Tensor) -> Tensor:
        raise AssertionError("layers of transformers have no recurrence of ours")

    def check(self, config: Any) -> None:
        """Raise unless all layers attended once per chunk, with equal heads and the config's windows."""
        if sorted(self.sizes) != list(range(config.num_hidden_layers)) or self._calls != self._chunks * len(self.sizes):
            raise Unpaged("not every layer attends once")
        if len(set(self.sizes.values())) > 1:
            raise Unpaged("layers with heads of different sizes are not supported")
        kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
        if not window:
            return
        slide = [kind == SLIDING for kind in kinds] if kinds else [True] * len(self.sizes)
        if [self._windows[layer] for layer in sorted(self._windows)] != [window if s else None for s in slide]:
            raise UsageError("sliding_window does not reach the layers that it is meant for")
