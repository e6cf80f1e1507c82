"""The model's forward pass for a few tokens on CUDA in five kernels a layer, launched one after the other.

They are what stands before a layer's `wqkv`, that, and what stands between it and attention; attention; `wo` and the
residual add; `w13` and SwiGLU; `w2` and the residual add. The model's own forward pass is what this is checked against,
and what decodes where `explain_unfusable` has a reason. Weights, caches and tables are the model's.

Shapes: B batch, S tokens in this call, M = B * S of them in all, R those of S whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gptfast.kernels.cuda.configurations import MAX_ROWS
from gptfast.kernels.cuda.packing import PackedWeight
from gptfast.linear import TritonEmbedding, TritonLinear
from gptfast.model import Transformer, TransformerBlock

if TYPE_CHECKING:
    from gptfast.kernels.cuda.fused_attention import FusedScratch
    from gptfast.kernels.cuda.fused_ops import Inputs

PROJECTIONS = ("wqkv", "wo", "w13", "w2")
LEAST_PDL_CAPABILITY = (9, 0)

_handles = itertools.count()
_passes: weakref.WeakValueDictionary[int, FusedTransformer] = weakref.WeakValueDictionary()
"""By handle, as an operator takes tensors and numbers alone; counted, so that compiled code finds itself again."""


@dataclass(frozen=True)
class FusedBlock:
    """A layer's matrices, and the memory of what its kernels leave for one another.

    Attributes:
        block: the layer.
        wqkv, wo, w13, w2: its matrices.
        wqkv_inputs, wo_inputs, w13_inputs, w2_inputs: what they are multiplied with.
    """

    block: TransformerBlock
    wqkv: PackedWeight
    wo: PackedWeight
    w13: PackedWeight
    w2: PackedWeight
    wqkv_inputs: Inputs
    wo_inputs: Inputs
    w13_inputs: Inputs
    w2_inputs: Inputs


@dataclass(frozen=True)
class FusedBuffers:
    """What a pass over (B, S) tokens writes, of which nothing is kept for the next.

    Attributes:
        x: (M, E) the residual stream.
        q: (B, S, H, D) queries.
        blocks: the layers.
        head_inputs: what the output layer is multiplied with.
        scratch: of attention.
        slots: of the caches that the scratch is for.
    """

    x: Tensor
    q: Tensor
    blocks: tuple[FusedBlock, ...]
    head_inputs: Inputs
    scratch: FusedScratch
    slots: int


class FusedTransformer:
    """Stands for a `Transformer` in the steps that decode, of up to 16 tokens in all rows.

    With `pdl` a kernel begins to load its weights while the one before it ends (programmatic dependent launch, from
    sm_90 on). A row's logits are the same to the bit whatever is beside it, if the model was loaded with `exact_rows`.
    """

    def __init__(self, model: Transformer, *, pdl: bool) -> None:
        assert explain_unfusable(model) is None
        register_operator()
        self.model = model
        self.pdl = pdl
        self._exact_rows = get_linear(list_blocks(model)[0].attention.wqkv).exact_rows
        self._buffers: dict[tuple[int, int], FusedBuffers] = {}
        self._handle = next(_handles)
        _passes[self._handle] = self

    def __call__(self, tokens: Tensor, input_pos: Tensor, kv_pos: None, rows: Tensor | None = None) -> Tensor:
        """Logits (B, R or S, V) float32; see `Transformer.forward`. A compiler takes the pass as one operator."""
        logits: Tensor = torch.ops.gptfast.fused_pass.default(tokens, input_pos, self._handle)
        return logits if rows is None else logits[:, rows]

    def run(self, tokens: Tensor, input_pos: Tensor) -> Tensor:
        """Logits (B, S, V) float32 after tokens (B, S) int64 at `input_pos` (S,); the tokens' keys are written."""
        from gptfast.kernels.cuda import fused_ops
        from gptfast.kernels.cuda.fused_attention import attend_fused

        model, eps, pdl = self.model, self.model.config.norm_eps, self.pdl
        buffers = self._get_buffers(*tokens.shape)
        x, blocks = buffers.x, buffers.blocks
        norms = [layer.block.attention_norm.weight for layer in blocks] + [model.norm.weight]
        inputs = [layer.wqkv_inputs for layer in blocks] + [buffers.head_inputs]
        fused_ops.embed(x, inputs[0], norms[0], tokens.flatten(), get_embedding(model))
        for layer, next_norm, next_inputs in zip(blocks, norms[1:], inputs[1:], strict=True):
            attention, cache = layer.block.attention, layer.block.attention.kv_cache
            fused_ops.project_qkv(
                buffers.q,
                layer.wqkv_inputs,
                eps,
                layer.wqkv,
                attention.wqkv.bias,
                model.rope_cos,
                model.rope_sin,
                input_pos,
                cache.k,
                cache.v,
                pdl=pdl,
            )
            attend_fused(
                layer.wo_inputs.planes,
                buffers.q,
                cache.k,
                cache.v,
                input_pos,
                buffers.scratch,
                sliding_window=model.sliding_window,
                kind=layer.wo_inputs.kind,
                is_vector=layer.wo_inputs.is_vector,
                pdl=pdl,
            )
            ffn_norm = layer.block.ffn_norm.weight
            fused_ops.add_product(x, layer.w13_inputs, ffn_norm, layer.wo_inputs, layer.wo, attention.wo.bias, pdl=pdl)
            fused_ops.project_swiglu(layer.w2_inputs, layer.w13_inputs, eps, layer.w13, pdl=pdl)
            fused_ops.add_product(x, next_inputs, next_norm, layer.w2_inputs, layer.w2, None, pdl=pdl)
        head = get_head(model)
        logits = x.new_empty(x.shape[0], head.shape[0], dtype=torch.float32)
        fused_ops.project_head(logits, buffers.head_inputs, eps, head, pdl=pdl)
        return logits.view(*tokens.shape, -1)

    def _get_buffers(self, batch_size: int, tokens: int) -> FusedBuffers:
        """The buffers of a pass; made when it is first run, before it is recorded, or when the cache has grown."""
        found = self._buffers.get((batch_size, tokens))
        if found is None or found.slots != get_slots(self.model):
            found = self._buffers[batch_size, tokens] = make_buffers(
                self.model, batch_size, tokens, exact_rows=self._exact_rows
            )
        return found


def make_buffers(model: Transformer, batch_size: int, tokens: int, *, exact_rows: bool) -> FusedBuffers:
    """Memory for passes over (B, S) tokens. Layers follow each other, so they share what is alike."""
    from gptfast.kernels.cuda import fused_ops
    from gptfast.kernels.cuda.fused_attention import make_fused_scratch

    config, device, rows, slots = model.config, model.device, batch_size * tokens, get_slots(model)
    shared: dict[tuple[object, ...], Inputs] = {}

    def make(weight: PackedWeight, *, is_normed: bool, follows: PackedWeight | None = None) -> Inputs:
        parts = None if follows is None else fused_ops.count_programs(follows, rows, exact_rows=exact_rows)
        key = weight.kind, weight.shape[1], is_normed, parts
        if key not in shared:
            shared[key] = fused_ops.make_inputs(
                weight, rows, model.dtype, exact_rows=exact_rows, is_normed=is_normed, follows=follows
            )
        return shared[key]

    blocks: list[FusedBlock] = []
    previous: PackedWeight | None = None
    for block in list_blocks(model):
        attention, feed_forward = block.attention, block.feed_forward
        wqkv, wo, w13, w2 = (
            get_linear(module).list_packed()[0]
            for module in (attention.wqkv, attention.wo, feed_forward.w13, feed_forward.w2)
        )
        blocks.append(
            FusedBlock(
                block=block,
                wqkv=wqkv,
                wo=wo,
                w13=w13,
                w2=w2,
                wqkv_inputs=make(wqkv, is_normed=True, follows=previous),
                wo_inputs=make(wo, is_normed=False),
                w13_inputs=make(w13, is_normed=True, follows=wo),
                w2_inputs=make(w2, is_normed=False),
            )
        )
        previous = w2
    heads, kv_heads, head_dim = config.n_heads, config.n_kv_heads, config.head_dim
    return FusedBuffers(
        x=torch.empty(rows, config.dim, dtype=model.dtype, device=device),
        q=torch.empty(batch_size, tokens, heads, head_dim, dtype=model.dtype, device=device),
        blocks=tuple(blocks),
        head_inputs=make(get_head(model), is_normed=True, follows=previous),
        scratch=make_fused_scratch(batch_size, tokens, heads, kv_heads, head_dim, slots, device=device),
        slots=slots,
    )


def list_blocks(model: Transformer) -> list[TransformerBlock]:
    """Its layers."""
    return [block for block in model.layers if isinstance(block, TransformerBlock)]


def has_pdl(device: torch.device) -> bool:
    """Whether it is a GPU that launches kernels before those they depend on have ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_PDL_CAPABILITY


def get_slots(model: Transformer) -> int:
    """How many slots the model's caches have."""
    return model.list_caches()[0].k.shape[2]


def get_linear(module: nn.Module) -> TritonLinear:
    """A layer that `explain_unfusable` has found to be one."""
    assert isinstance(module, TritonLinear)
    return module


def get_head(model: Transformer) -> PackedWeight:
    """The matrix of the output layer."""
    if model.output is not None:
        return get_linear(model.output).list_packed()[0]
    assert isinstance(model.tok_embeddings, TritonEmbedding)
    return model.tok_embeddings.list_packed()[0]


def get_embedding(model: Transformer) -> PackedWeight | Tensor:
    """The matrix of which tokens are rows."""
    embedding = model.tok_embeddings
    return embedding.list_packed()[0] if isinstance(embedding, TritonEmbedding) else embedding.weight


def explain_unfusable(model: Transformer, kv_dtype: torch.dtype | None = None, batch_size: int = 1) -> str | None:
    """Why the model has no fused pass for so many texts, with such keys and values; None if it has one."""
    if model.kernels != "triton":
        return "it needs the Triton kernels"
    if batch_size > MAX_ROWS:
        return f"a batch of {batch_size} is more than the {MAX_ROWS} tokens that it is for"
    if kv_dtype == torch.int8:
        return "keys and values are rounded to int8"
    if model.config.qk_norm:
        return "the heads of queries and keys are normed"
    modules = {name: module for name, module in model.named_modules() if name.endswith(PROJECTIONS)}
    modules |= {"tok_embeddings": model.tok_embeddings} if model.output is None else {"output": model.output}
    for name, module in modules.items():
        if not isinstance(module, TritonLinear | TritonEmbedding):
            return f"{name} is not packed for the Triton kernels"
        if len(module.list_matrices()) > 1:
            return f"the parts of {name} are stored in different ways"
    return None


@functools.cache
def register_operator() -> object:
    """Make `gptfast::fused_pass` known to torch, once; it is there as long as what is returned.

    That it writes to caches is not told: they are no arguments, and nothing else meets them in a step.
    """
    library: Any = torch.library.Library("gptfast", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(
        "fused_pass(Tensor tokens, Tensor input_pos, int handle) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
    )
    library.impl("fused_pass", run_pass, "CompositeExplicitAutograd")
    torch.library.register_fake("gptfast::fused_pass", make_logits, lib=library)
    return library


def run_pass(tokens: Tensor, input_pos: Tensor, handle: int) -> Tensor:
    """`FusedTransformer.run` of the one with that handle."""
    return _passes[handle].run(tokens, input_pos)


def make_logits(tokens: Tensor, input_pos: Tensor, handle: int) -> Tensor:
    """What `run_pass` returns."""
    return tokens.new_empty(*tokens.shape, _passes[handle].model.config.vocab_size, dtype=torch.float32)
