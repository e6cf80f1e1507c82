"""From a checkpoint to a model in memory: built on `meta`, filled tensor by tensor, checked strictly."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gptfast.checkpoint.base import Checkpoint, check_tensor
from gptfast.checkpoint.shapes import list_tensor_shapes
from gptfast.errors import CheckpointError
from gptfast.model import FUSED_PROJECTIONS, Transformer

EMBEDDING = "tok_embeddings.weight"
HEAD = "output.weight"


def load_model(
    checkpoint: Checkpoint, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Transformer:
    """Build the model with the checkpoint's weights in `dtype` on `device`, in evaluation mode.

    A weight that is stored as it is needed stays a view of the mapped file. Raises CheckpointError if a tensor
    is missing, unknown or of another shape than the config asks for.
    """
    shapes = list_tensor_shapes(checkpoint.config)
    aliases = check_names(checkpoint, set(shapes))
    with torch.device("meta"):
        model = Transformer(checkpoint.config)
    for name, parameter in list(model.named_parameters()):
        sources = {aliases.get(source, source): shapes[source] for source in list_sources(name)}
        weight = _read_parameter(checkpoint, sources, parameter.shape, torch.device(device), dtype)
        module_name, _, parameter_name = name.rpartition(".")
        setattr(model.get_submodule(module_name), parameter_name, nn.Parameter(weight, requires_grad=False))
    return model.eval()


def list_sources(name: str) -> list[str]:
    """The checkpoint's tensors that a parameter of the model is made of, in the order of its rows."""
    *prefix, module, kind = name.split(".")
    parts = FUSED_PROJECTIONS.get(module, (module,))
    return [".".join([*prefix, part, kind]) for part in parts]


def check_names(checkpoint: Checkpoint, expected: set[str]) -> dict[str, str]:
    """Compare the tensors there are with the `expected` ones; raise CheckpointError on a difference.

    Returns by which other name a tensor goes: with a tied head, either name may stand for both.
    """
    found = set(checkpoint.names())
    aliases: dict[str, str] = {}
    if checkpoint.config.tie_word_embeddings and HEAD in found:
        if EMBEDDING not in found:
            aliases[EMBEDDING] = HEAD
            found.add(EMBEDDING)
        elif not torch.equal(checkpoint.read(EMBEDDING), checkpoint.read(HEAD)):
            raise CheckpointError(
                f"the config of {checkpoint.path} ties {HEAD} to {EMBEDDING} but they differ; "
                "set tie_word_embeddings to false"
            )
        found.remove(HEAD)
    for problem, names in (("lacks", expected - found), ("has the unknown", found - expected)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"{checkpoint.path} {problem} tensor {min(names)}{more} for its architecture "
                f"{checkpoint.config.architecture}; it is incomplete or of another architecture"
            )
    return aliases


def _read_parameter(
    checkpoint: Checkpoint,
    sources: dict[str, tuple[int, ...]],
    shape: torch.Size,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """The parameter of that shape, made of the checkpoint's tensors `sources`, which are given with their shapes."""
    if len(sources) == 1 and device.type == "cpu":
        [source] = sources
        view = checkpoint.view(source)
        if view is not None and view.dtype == dtype:
            check_tensor(checkpoint.path, source, view, tuple(shape))
            return view.contiguous()
    weight = torch.empty(shape, dtype=dtype, device=device)
    parts = torch.split(weight, [source_shape[0] for source_shape in sources.values()])
    for source, part in zip(sources, parts, strict=True):
        checkpoint.read_into(source, part)
    return weight
