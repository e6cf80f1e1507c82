"""What a model is: frozen dataclasses that every checkpoint reader fills and the model obeys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gptfast.errors import CheckpointError, UserError


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are changed for contexts longer than the trained one.

    `linear` divides every frequency by `factor` (Chen et al. 2023). `llama3` divides the low
    frequencies by `factor`, keeps the high ones and blends between (Meta, Llama 3.1).
    `factors` divides frequency i by `factors[i]`: the form that a GGUF file stores.
    """

    kind: Literal["linear", "llama3", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of a Llama-family decoder, in the words of Meta's reference.

    Sizes are counts of elements; `max_seq_len` is the context the model was made for, in tokens.
    `sliding_window` is the number of most recent tokens (itself included) that a token attends to.
    """

    architecture: str
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    max_seq_len: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        sizes = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size", "max_seq_len")
        for name in sizes:
            if getattr(self, name) < 1:
                raise CheckpointError(f"{name} is {getattr(self, name)} in the model's config; it must be at least 1")
        if self.n_heads % self.n_kv_heads:
            raise CheckpointError(
                f"{self.n_heads} query heads cannot share {self.n_kv_heads} key/value heads; "
                "the config's n_heads must be a multiple of n_kv_heads"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim is {self.head_dim} in the model's config; rotary embeddings need it even")

    def get_kv_bytes_per_token(self, element_bytes: int, *, has_scales: bool = False) -> int:
        """Bytes of keys and values that one token of one sequence takes in all layers.

        With scales, every key and every value of a head has one of 4 bytes.
        """
        return 2 * self.n_layers * self.n_kv_heads * (self.head_dim * element_bytes + (4 if has_scales else 0))


@dataclass(frozen=True)
class SamplingKind:
    """What sampling consists of, without its values: the part that the code of a step depends on."""

    is_greedy: bool
    has_top_k: bool
    has_top_p: bool
    has_min_p: bool
    has_penalty: bool


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen from the logits.

    `temperature` 0 is exact greedy decoding. `top_k` None, 0 or -1, `top_p` 1 and `min_p` 0 switch
    the filter off; they apply in that order, after the temperature. `repetition_penalty` divides
    positive and multiplies negative logits of every token seen so far (Keskar et al. 2019).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < math.inf):
            raise UserError(f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number")
        if self.top_k is not None and self.top_k < -1:
            raise UserError(f"top-k is {self.top_k}; it must be positive, or 0 to keep every token")
        for name, value in (("top-p", self.top_p), ("min-p", self.min_p)):
            if not 0 <= value <= 1:
                raise UserError(f"{name} is {value}; it must lie between 0 and 1")
        if not (0 < self.repetition_penalty < math.inf):
            raise UserError(f"repetition penalty is {self.repetition_penalty}; it must be positive, 1 for none")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed is {self.seed}; it must lie between 0 and 2**63 - 1")

    @property
    def kind(self) -> SamplingKind:
        """Which of the settings have an effect."""
        is_greedy = self.temperature == 0
        return SamplingKind(
            is_greedy=is_greedy,
            has_top_k=not is_greedy and self.top_k not in (None, 0, -1),
            has_top_p=not is_greedy and self.top_p < 1,
            has_min_p=not is_greedy and self.min_p > 0,
            has_penalty=self.repetition_penalty != 1,
        )

    @property
    def log_min_p(self) -> float:
        """The natural logarithm of `min_p`; minus infinity for 0."""
        return math.log(self.min_p) if self.min_p else -math.inf


@dataclass(frozen=True)
class GenerationDefaults:
    """What a checkpoint says about starting, ending and sampling text, beside its weights."""

    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    sampling: SamplingConfig = SamplingConfig()
