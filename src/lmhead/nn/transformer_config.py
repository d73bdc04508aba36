"""The configuration of a Transformer; sizes have the names that Hugging Face gives them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from lmhead import checks

Position = Literal["learned", "sinusoidal", "rotary", "none"]
Pairs = Literal["half", "interleaved"]
Norm = Literal["layer", "rms"]
Activation = Literal["relu", "gelu", "gelu_tanh", "swiglu"]
Init = Literal["normal", "xavier", "torch"]


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The options that encoders and decoders share, validated."""

    vocab_size: int  # V
    hidden_size: int  # D
    num_attention_heads: int  # H, the number of query heads
    # G, the number of key heads, each shared by H / G query heads; None for H
    num_key_value_heads: int | None = None
    head_dim: int | None = None  # d, the size of a head; None for D / H
    # the width of the feed-forward; None for 4 D, or about 8/3 D for "swiglu", which has three
    # matrices where the others have two
    intermediate_size: int | None = None
    max_length: int = 1024  # the maximum number of tokens at once; the number of learned positions
    # "learned" and "sinusoidal" vectors are added to the embedding, "rotary" rotates queries and
    # keys, "none" leaves the order to the causal mask
    position: Position = "learned"
    # which coordinates of a head are rotated together: "half" pairs i with i + d/2 (Hugging Face),
    # "interleaved" pairs 2i with 2i + 1 (the original, and llama2.c). The weights of one are a
    # permutation of the other's
    rotary: Pairs = "half"
    rope_theta: float = 10000.0  # the base of the angles
    # d/2 numbers by which the angles are divided, to extend a model to longer texts than it was
    # trained on; None for ones
    rope_factors: tuple[float, ...] | None = None
    norm: Norm = "layer"  # "layer" (LayerNorm) or "rms" (RMSNorm)
    norm_eps: float = 1e-5  # ε of the norm
    # True for x + f(norm(x)) with a norm after the last block, as in nearly every model since
    # GPT-2; False for norm(x + f(x)), the Transformer of 2017
    norm_first: bool = True
    activation: Activation = "gelu"  # of the feed-forward; "gelu_tanh" is GPT-2's approximation
    # whether linear layers and LayerNorms have one; for the head see `head_bias`
    bias: bool = False
    dropout: float = 0.0  # of the embedding and of the output of every sublayer
    attention_dropout: float = 0.0  # of the attention weights
    embedding_scale: float = 1.0  # a factor of the token embedding; √D in the Transformer of 2017
    tied: bool = True  # whether the head's weight is the embedding's
    head_bias: bool = False  # whether the head has a bias
    softcap: float | None = None  # of the head, see `LMHead`
    scale: float = 1.0  # of the head, see `LMHead`
    # initial values of matrices. "normal": normal with standard deviation `init_std`, the last
    # matrix of a sublayer divided by √(number of sublayers), as in GPT-2; "xavier": Glorot's
    # uniform; "torch": the defaults of torch's layers. Biases start at 0 except with "torch"
    init: Init = "normal"
    # standard deviation for "normal", and of the embeddings unless `init` is "torch"
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_attention_heads", "max_length"):
            checks.check_integer(name, getattr(self, name), low=1)
        for name in ("num_key_value_heads", "head_dim", "intermediate_size"):
            if getattr(self, name) is not None:
                checks.check_integer(name, getattr(self, name), low=1)
        for name, kinds in _KINDS.items():
            if getattr(self, name) not in kinds:
                wanted = " or ".join(map(repr, kinds))
                raise ValueError(f"{name} must be {wanted}; got {getattr(self, name)!r}")
        for name in ("norm_first", "bias", "tied", "head_bias"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False; got {getattr(self, name)!r}")
        for name in ("rope_theta", "norm_eps", "init_std"):
            checks.check_number(name, getattr(self, name), low=0.0, above=True)
        for name in ("dropout", "attention_dropout"):
            checks.check_number(name, getattr(self, name), low=0.0, high=1.0)
        checks.check_number("embedding_scale", self.embedding_scale)
        checks.check_map(self.softcap, self.scale)
        heads = self.num_attention_heads
        if heads % self.key_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, {self.key_heads}; "
                f"got {heads}"
            )
        if self.head_dim is None and self.hidden_size % heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads, {heads}; "
                f"got {self.hidden_size}"
            )
        if self.position == "rotary" and self.head_size % 2:
            raise ValueError(f"head_dim must be even for rotary positions; got {self.head_size}")
        if self.rope_factors is not None:
            object.__setattr__(self, "rope_factors", tuple(self.rope_factors))  # a list, from JSON
            if len(self.rope_factors) != self.head_size // 2:
                raise ValueError(
                    f"rope_factors must be {self.head_size // 2} numbers, one for each pair of a "
                    f"head's {self.head_size} coordinates; got {len(self.rope_factors)}"
                )
            for factor in self.rope_factors:
                checks.check_number("rope_factors", factor, low=0.0, above=True)
        if self.position == "sinusoidal" and self.hidden_size % 2:
            raise ValueError(
                "hidden_size must be even, for a sine and a cosine of each angle; "
                f"got {self.hidden_size}"
            )

    @property
    def key_heads(self) -> int:
        """The number G of key heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """The size d of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def inner_size(self) -> int:
        """The width of the feed-forward."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        if self.activation == "swiglu":
            return -(-8 * self.hidden_size // 3 // 8) * 8  # two thirds of 4 D, a multiple of 8
        return 4 * self.hidden_size

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments that make this configuration, for a JSON file."""
        return asdict(self)


_KINDS: dict[str, tuple[str, ...]] = {
    "position": get_args(Position),
    "rotary": get_args(Pairs),
    "norm": get_args(Norm),
    "activation": get_args(Activation),
    "init": get_args(Init),
}


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(TransformerConfig):
    """The configuration of a decoder: `TransformerConfig` and the number of blocks.

    >>> config = DecoderConfig(
    ...     vocab_size=65, hidden_size=128, num_hidden_layers=4, num_attention_heads=4
    ... )
    >>> config.head_size, config.inner_size
    (32, 512)
    >>> DecoderConfig(**config.to_dict()) == config
    True
    """

    num_hidden_layers: int

    def __post_init__(self) -> None:
        checks.check_integer("num_hidden_layers", self.num_hidden_layers, low=1)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(TransformerConfig):
    """The configuration of an encoder and decoder: `TransformerConfig` and the numbers of blocks.

    `max_length` bounds the source and the target each.

    >>> config = EncoderDecoderConfig(
    ...     vocab_size=9, hidden_size=32, num_attention_heads=4, encoder_layers=3, decoder_layers=2
    ... )
    >>> config.decoder().num_hidden_layers
    2
    """

    encoder_layers: int
    decoder_layers: int

    def __post_init__(self) -> None:
        checks.check_integer("encoder_layers", self.encoder_layers, low=1)
        checks.check_integer("decoder_layers", self.decoder_layers, low=1)
        super().__post_init__()

    def decoder(self) -> DecoderConfig:
        """Return the configuration of the decoder."""
        shared = {f.name: getattr(self, f.name) for f in fields(TransformerConfig)}
        return DecoderConfig(**shared, num_hidden_layers=self.decoder_layers)
