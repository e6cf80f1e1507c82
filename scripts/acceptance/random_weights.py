"""Models of random weights, made on the device in the form that the kernels read."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from gptfast.config import ModelConfig
from gptfast.kernels.cuda.packing import pack, unpack
from gptfast.kernels.cuda.products import Format, draw_packed
from gptfast.linear import Embedding, TritonEmbedding, TritonLinear, TritonMatrix
from gptfast.model import Transformer

BF16, FP8, INT8 = Format("bf16"), Format("fp8"), Format("int8")
INT4_G32, INT4_G128 = Format("int4", 32), Format("int4", 128)


def build_model(
    config: ModelConfig,
    form: Format | Literal["dense"],
    *,
    dtype: torch.dtype,
    device: torch.device,
    head: Format | None = None,
    exact_rows: bool = False,
    seed: int = 0,
) -> Transformer:
    """A model with random matrices of that form, its embedding and output layer of `head` where that is given.

    An embedding that is not the output layer too is bf16. `dense` matrices are multiplied by the library.
    """
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device("meta"):
        model = Transformer(config).to(dtype)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear | nn.Embedding):
            is_last = name == "output" or (name == "tok_embeddings" and config.tie_word_embeddings)
            chosen: Format | Literal["dense"] = form
            if name == "tok_embeddings" and not is_last:
                chosen = "dense"
            elif is_last and head is not None:
                chosen = head
            model.set_submodule(name, make_layer(module, chosen, dtype, generator, exact_rows))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                value = torch.zeros if name == "bias" else torch.ones
                fresh = value(parameter.shape, dtype=dtype, device=device)
                setattr(module, name, nn.Parameter(fresh, requires_grad=False))
    model.set_kernels("triton")
    return model.eval()


def make_layer(
    module: nn.Linear | nn.Embedding,
    form: Format | Literal["dense"],
    dtype: torch.dtype,
    generator: torch.Generator,
    exact_rows: bool,
) -> nn.Module:
    """What takes the place of a layer that is on `meta`."""
    rows, columns = module.weight.shape
    if form == "dense":
        weight = torch.empty(rows, columns, dtype=dtype, device=generator.device)
        weight.normal_(0.0, columns**-0.5, generator=generator)
        module.weight = nn.Parameter(weight, requires_grad=False)
        return module
    matrix = TritonMatrix(draw_packed(form, rows, columns, generator), form.name)
    if isinstance(module, nn.Embedding):
        return TritonEmbedding(matrix, dtype=dtype, exact_rows=exact_rows)
    packed = TritonLinear([matrix], exact_rows=exact_rows)
    packed.bias = module.bias
    return packed


def expand_model(
    model: Transformer, form: Literal["packed", "bf16", "dense"], *, exact_rows: bool = False
) -> Transformer:
    """The same model with its packed matrices as floats of the activations' dtype; other layers are shared.

    `packed` ones are shared too. A `dense` model multiplies and attends by torch's own operators alone. Caches are its
    own.
    """
    with torch.device("meta"):
        expanded = Transformer(model.config)
    expanded.set_kernels(None if form == "dense" else model.kernels)
    for name in {name.rpartition(".")[0] for name, _ in expanded.named_parameters()}:
        module = model.get_submodule(name)
        if isinstance(module, TritonLinear | TritonEmbedding) and form != "packed":
            expand = expand_packed if form == "bf16" else expand_dense
            expanded.set_submodule(name, expand(module, model.dtype, exact_rows))
        else:
            expanded.set_submodule(name, module)
    return expanded.eval()


def expand_packed(module: TritonLinear | TritonEmbedding, dtype: torch.dtype, exact_rows: bool) -> nn.Module:
    """A layer of bfloat16 for our kernels."""
    parts = [TritonMatrix(pack(unpack(weight).bfloat16()), BF16.name) for weight in module.list_packed()]
    if isinstance(module, TritonEmbedding):
        return TritonEmbedding(parts[0], dtype=dtype, exact_rows=exact_rows)
    layer = TritonLinear(parts, exact_rows=exact_rows)
    layer.bias = module.bias
    return layer


def expand_dense(module: TritonLinear | TritonEmbedding, dtype: torch.dtype, exact_rows: bool) -> nn.Module:
    """A layer for torch's own products."""
    weight = torch.cat([unpack(weight).to(dtype) for weight in module.list_packed()])
    with torch.device("meta"):
        rows, columns = weight.shape
        embedding, linear = Embedding(rows, columns), nn.Linear(columns, rows, bias=False)
    parameter = nn.Parameter(weight, requires_grad=False)
    if isinstance(module, TritonEmbedding):
        embedding.weight = parameter
        return embedding
    linear.weight = parameter
    linear.register_parameter("bias", module.bias)
    return linear
