"""Runs families without a file here: transformers' own model, with the engine's attention.

It is slower than a family of ours: its layers are not packed, its small operations not fused. It attends through the
`ForwardContext` over paged keys and values, also in a draft's tree. A model that is not a function of tokens, positions
and causal attention is refused: on loading, a short text in two parts must give the logits of transformers' own
attention. Code that comes with a checkpoint is never run."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ssd.errors import UsageError
from ssd.layers.attention import PLAIN, Scores, attend
from ssd.layers.norm import Residual
from ssd.layers.recurrent import Recurrence
from ssd.models.checkpoint import Checkpoint
from ssd.models.interface import ForwardContext, Shape
from ssd.models.pairs import DRAFT_VOCAB, SHARED
from ssd.models.quantization import QUANTIZATION
from ssd.models.stored import check_finite, check_type
from ssd.system.version import HOW_TO_INSTALL, installed_transformers

_NAME = "ssd"  # the attention below is registered in transformers under this name
_PROBE, _CUT = 12, 7  # tokens of the text tried on loading, and of its first part
# Scalings whose frequencies depend on the length of the text: cached keys would have to be rotated again.
_MOVING_ROPE = {"dynamic", "longrope"}
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, max_position: int, dummy: bool) -> Fallback:
    """Load a checkpoint as transformers' model; raise `UsageError` with the cause if it cannot run here."""
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
    _check(kind, config)
    try:
        model = _build(kind, config, checkpoint, dtype, dummy).to(device).eval().requires_grad_(False)
        return Fallback(model, dtype, device, max_position)
    except UsageError:
        raise
    except Exception as error:  # code that was written for other uses may raise anything
        first, *_ = str(error).splitlines() or [""]
        raise UsageError(
            f"transformers {installed_transformers()} cannot run it: {type(error).__name__}: {first}"
        ) from error


def _check(kind: Any, config: Any) -> None:
    """Raise UsageError for a class or config that cannot run here, before weights are loaded."""
    if not getattr(kind, "_supports_attention_backend", False):
        raise UsageError(f"transformers' {kind.__name__} does not attend through its attention interface")
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := kinds - _KNOWN_LAYERS:
        raise UsageError(f"layers of {min(unknown)!r} are not supported")
    if getattr(config, "attention_chunk_size", None):
        raise UsageError("attention_chunk_size is not supported")
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if part.get("rope_type") in _MOVING_ROPE:
            raise UsageError(f"rope scaling {part['rope_type']!r} is not supported")


def _build(kind: Any, config: Any, checkpoint: Checkpoint, dtype: torch.dtype, dummy: bool) -> nn.Module:
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attention)
    if dummy:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same in every process
            model: nn.Module = kind._from_config(config, dtype=dtype, attn_implementation=_NAME)
        return model
    for name, tensor in checkpoint.tensors.items():
        if name.endswith(".weight"):  # other tensors, such as the masks of old checkpoints, are not weights
            check_type(name, tensor)
    model, report = kind.from_pretrained(
        checkpoint.directory,
        config=config,
        dtype=dtype,
        attn_implementation=_NAME,
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

    q, k, v [1, heads, n, head_dim] -> [1, n, heads, head_dim]. Raises UsageError if a layer does not give its index or
    the context."""
    layer: Any = getattr(module, "layer_idx", None)
    if context is None or not isinstance(layer, int):
        raise UsageError(f"{type(module).__name__} does not say which layer it is, or hides what it is called with")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    sinks = None if s_aux is None else s_aux.to(torch.promote_types(s_aux.dtype, torch.float32)).contiguous()
    out = context.attend(layer, q.contiguous(), k, v, Scores(scaling, sliding_window, softcap, sinks))
    return out.view(1, q.shape[0], q.shape[1], -1), None


class _Given(nn.Module):
    """Stands in for a decoder whose hidden states are known already."""

    def forward(self, *_: Any, given: Tensor, **__: Any) -> _Output:
        return _Output(given)


class _Output:
    """A decoder's output with hidden states only: every other attribute or item is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None


def _headed(model: nn.Module, decoder: nn.Module) -> nn.Module:
    """Return a copy of the model, weights shared, whose decoder returns the hidden states `given` to it.

    The family's own steps from hidden states to logits still apply."""
    path = next(name for name, module in model.named_modules() if module is decoder)
    if not path:
        raise UsageError("its decoder cannot be told from its head")
    *above, last = path.split(".")
    copied = at = _shallow(model)
    for name in above:
        below = at._modules[name] = _shallow(at.get_submodule(name))
        at = below
    at._modules[last] = _Given()
    return copied


def _shallow(module: nn.Module) -> nn.Module:
    other = copy.copy(module)
    other._modules = dict(module._modules)
    return other


def _show_layers(decoder: nn.Module, count: int) -> None:
    """Pass the hidden states of each of `count` layers to `context.keep_hidden`, if the layers are found."""
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


class Fallback:
    """A causal language model of transformers; see `ssd.models.interface.Model`."""

    def __init__(self, model: Any, dtype: torch.dtype, device: torch.device, max_position: int) -> None:
        self.dtype, self.device = dtype, device
        self._decoder = model.get_decoder()
        self._head = _headed(model, self._decoder)
        self.shape = self._tried(model, max_position)
        _show_layers(self._decoder, self.shape.layers)

    @torch.inference_mode()
    def _tried(self, model: Any, max_position: int) -> Shape:
        """Return the sizes of the model, seen while it runs a short text; raise UsageError for wrong logits."""
        vocab_size: int = model.get_input_embeddings().num_embeddings
        ids = torch.arange(1, 1 + _PROBE, device=self.device) * 7919 % vocab_size
        context = _Probe(self.device)
        parts = []
        for part in (ids[:_CUT], ids[_CUT:]):
            context.extend(len(part))
            parts.append(self.logits(self.forward(part, context)))
        logits = torch.cat(parts).double()
        context.check(model.config)
        model.set_attn_implementation("eager")
        expected = model(ids[None], use_cache=False).logits[0].double()
        model.set_attn_implementation(_NAME)
        tolerance = 1e-3 if torch.finfo(self.dtype).eps < 1e-4 else 0.1
        if not (logits - expected).abs().mean() <= tolerance * expected.std():
            raise UsageError("transformers' own attention gives other logits: it attends in a way of its own")
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

    def logits(self, hidden: Tensor) -> Tensor:
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=self.device)
        logits: Tensor = self._head(input_ids=ids, use_cache=False, given=hidden[None]).logits
        return logits[0]


class _Probe:
    """A context of one sequence that records each layer's heads, key heads, head size and window."""

    def __init__(self, device: torch.device) -> None:
        self.positions = torch.arange(0, device=device)
        self.sizes: dict[int, tuple[int, int, int]] = {}
        self._windows: dict[int, int | None] = {}
        self._past: dict[int, tuple[Tensor, Tensor]] = {}
        self._calls = self._chunks = 0

    def extend(self, count: int) -> None:
        """Go on to the next `count` positions."""
        start = int(self.positions[-1]) + 1 if len(self.positions) else 0
        self.positions = torch.arange(start, start + count, device=self.positions.device)
        self._chunks += 1

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Scores = PLAIN) -> Tensor:
        if k.shape != v.shape or q.shape[2] != k.shape[2]:
            raise UsageError("keys and values of different sizes are not supported")
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
        """Raise `UsageError` unless all layers attended once per chunk, with equal heads and the config's windows."""
        if sorted(self.sizes) != list(range(config.num_hidden_layers)) or self._calls != self._chunks * len(self.sizes):
            raise UsageError("not every layer attends once")
        if len(set(self.sizes.values())) > 1:
            raise UsageError("layers with heads of different sizes are not supported")
        kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
        if not window:
            return
        slide = [kind == "sliding_attention" for kind in kinds] if kinds else [True] * len(self.sizes)
        if [self._windows[layer] for layer in sorted(self._windows)] != [window if s else None for s in slide]:
            raise UsageError("sliding_window does not reach the layers that it is meant for")
