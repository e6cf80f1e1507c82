"""GPTQ over a whole model: its blocks one after the other, each on what the rounded ones before it make of a text.

Within a block too, every layer is rounded by the inputs that the rounded layers before it give it.

Shapes: B sequences, S tokens of each, A sequences that are computed at once, E dim, K in_features of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptfast.checkpoint.base import Checkpoint
from gptfast.checkpoint.shapes import list_tensor_shapes
from gptfast.config import ModelConfig
from gptfast.loading import EMBEDDING, HEAD, list_sources
from gptfast.model import TransformerBlock, build_attention_mask, compute_rope_tables
from gptfast.quantization import QuantizedWeight, WeightScheme
from gptfast.rounding import round_to_nearest
from quantize.gptq import Hessian, compensate, factorize

TOKENS_AT_ONCE = 4096
"""Tokens that are computed at once, in whole sequences."""

ChooseScheme = Callable[[str], WeightScheme | None]
RoundedMatrices = Iterator[tuple[str, QuantizedWeight]]


@torch.inference_mode()
def iterate_gptq(checkpoint: Checkpoint, choose_scheme: ChooseScheme, token_ids: Tensor) -> RoundedMatrices:
    """Round the matrices of all blocks, in the order of the layers, by what a calibration text puts into them.

    Args:
        checkpoint: its weights are read one block at a time.
        choose_scheme: how the tensor with that canonical name (`layers.0.attention.wq.weight`) is rounded; None
            leaves it as it is.
        token_ids: (B, S) int64, the text.

    Yields canonical names with what became of the matrix. Memory holds the activations (B, S, E) and one block in
    float32, and at most 40 K^2 bytes for the second moment of one layer's inputs and what `factorize` makes of it.
    Raises UserError as `factorize` and `gptfast.rounding.round_to_nearest` do.
    """
    batches = embed(checkpoint, token_ids)
    for layer in range(checkpoint.config.n_layers):
        block = CalibratedBlock(checkpoint, layer, choose_scheme, batches)
        yield from block.round()
        batches = block.batches


def embed(checkpoint: Checkpoint, token_ids: Tensor) -> list[Tensor]:
    """What the first block reads (A, S, E) float32, for all of the token ids (B, S)."""
    table = checkpoint.read(EMBEDDING if EMBEDDING in checkpoint.names() else HEAD)
    rows = max(1, TOKENS_AT_ONCE // token_ids.shape[1])
    return [F.embedding(ids, table).float() for ids in torch.split(token_ids, rows)]


class CalibratedBlock:
    """A block in float32 that is rounded layer by layer.

    Attributes:
        batches: activations (A, S, E) float32: before `round` what the block reads, after it what it returns.
    """

    def __init__(self, checkpoint: Checkpoint, layer: int, choose_scheme: ChooseScheme, batches: list[Tensor]) -> None:
        self._checkpoint = checkpoint
        self._layer = layer
        self._choose_scheme = choose_scheme
        self.batches = batches
        self._block = self._load()
        self._attend = make_attend(self._block, checkpoint.config, batches[0].shape[1])

    def round(self) -> RoundedMatrices:
        """Round its matrices in the order in which a token meets them."""
        block, attend, feed = self._block, self._attend, self._feed_forward
        yield from self._round_layer("attention.wqkv", map(block.attention_norm, self.batches))
        yield from self._round_layer("attention.wo", catch_inputs(block.attention.wo, attend, self.batches))
        self.batches = [x + attend(x) for x in self.batches]
        yield from self._round_layer("feed_forward.w13", map(block.ffn_norm, self.batches))
        yield from self._round_layer("feed_forward.w2", catch_inputs(block.feed_forward.w2, feed, self.batches))
        self.batches = [x + feed(x) for x in self.batches]

    def _feed_forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._block.feed_forward(self._block.ffn_norm(x))
        return y

    def _load(self) -> TransformerBlock:
        with torch.device("meta"):
            block = TransformerBlock(self._checkpoint.config)
        for name, _ in list(block.named_parameters()):
            parts = [self._checkpoint.read(source).float() for source in self._list_sources(name)]
            module, _, kind = name.rpartition(".")
            setattr(block.get_submodule(module), kind, nn.Parameter(torch.cat(parts), requires_grad=False))
        return block

    def _list_sources(self, name: str) -> list[str]:
        """The checkpoint's tensors that a parameter of the block is made of."""
        return list_sources(f"layers.{self._layer}.{name}")

    def _round_layer(self, module: str, inputs: Iterable[Tensor]) -> RoundedMatrices:
        """Round the matrices of a linear layer with these inputs (A, S, K), and let it compute with what they became.

        They share their inputs, so what GPTQ must know of those is computed once.
        """
        weight = self._block.get_submodule(module).weight
        assert isinstance(weight, Tensor)
        sources = self._list_sources(f"{module}.weight")
        schemes = [self._choose_scheme(source) for source in sources]
        if not any(schemes):
            return
        hessian = Hessian(weight.shape[1])
        for batch in inputs:
            hessian.add(batch)
        statistics = factorize(hessian.compute(), name=sources[0])
        shapes = list_tensor_shapes(self._checkpoint.config)
        parts = torch.split(weight, [shapes[source][0] for source in sources])
        for source, scheme, part in zip(sources, schemes, parts, strict=True):
            if scheme is not None:
                # What a rule keeps as fp8 is rounded by itself: `compensate` chooses integers.
                rounded = (
                    round_to_nearest(part, scheme, name=source)
                    if scheme.is_float
                    else compensate(part, statistics, scheme, name=source)
                )
                part.copy_(rounded.dequantize())
                yield source, rounded


def make_attend(block: TransformerBlock, config: ModelConfig, length: int) -> Callable[[Tensor], Tensor]:
    """What the block's attention adds to activations (A, S, E), each row a text of its own of that length."""
    positions = torch.arange(length)
    cos, sin = (table[:, None] for table in compute_rope_tables(config, length))
    mask = build_attention_mask(positions, positions, config.sliding_window, torch.float32)
    mask = mask.repeat(config.n_heads // config.n_kv_heads, 1)

    def attend(x: Tensor) -> Tensor:
        block.attention.setup_cache(len(x), length, dtype=x.dtype, device=x.device)
        y: Tensor = block.attention(block.attention_norm(x), cos, sin, mask, positions, positions)
        return y

    return attend


def catch_inputs(linear: nn.Module, run: Callable[[Tensor], Tensor], batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """What `linear` is given while each of the batches runs."""
    caught: list[Tensor] = []
    hook = linear.register_forward_pre_hook(lambda _, arguments: caught.append(arguments[0]))
    try:
        for batch in batches:
            run(batch)
            yield caught.pop()
    finally:
        hook.remove()
