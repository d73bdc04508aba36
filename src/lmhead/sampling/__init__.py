"""Sampling: stages, the chain of stages, beam search, generation."""

from lmhead.sampler_options import Options
from lmhead.sampling.beam import Beams, beam_search, stream_beam_search
from lmhead.sampling.constraint_stages import (
    AllowedIds,
    BadWords,
    ForcedTokens,
    Guidance,
    LogitBias,
    MinLength,
    SequenceBias,
    Suppress,
)
from lmhead.sampling.events import Generation, TokenEvent
from lmhead.sampling.explain import Explanation, Step
from lmhead.sampling.generation import generate, stream_generate
from lmhead.sampling.grammar import Grammar
from lmhead.sampling.kept_log_prob import kept_log_prob
from lmhead.sampling.mirostat_stage import Mirostat1, Mirostat2
from lmhead.sampling.model import Body, Cache, Model, Tokenizer
from lmhead.sampling.penalty_stages import DRY, CountPenalty, NoRepeatNGram, RepetitionPenalty
from lmhead.sampling.run_stages import Kept, Sampled
from lmhead.sampling.sampler import Sampler
from lmhead.sampling.stage import Call, Cut, DynamicTemperature, Edit, Stage, Temperature
from lmhead.sampling.truncation_stages import (
    XTC,
    Epsilon,
    Eta,
    MinP,
    TopH,
    TopK,
    TopNSigma,
    TopP,
    Typical,
)

__all__ = [
    "DRY",
    "XTC",
    "AllowedIds",
    "BadWords",
    "Beams",
    "Body",
    "Cache",
    "Call",
    "CountPenalty",
    "Cut",
    "DynamicTemperature",
    "Edit",
    "Epsilon",
    "Eta",
    "Explanation",
    "ForcedTokens",
    "Generation",
    "Grammar",
    "Guidance",
    "Kept",
    "LogitBias",
    "MinLength",
    "MinP",
    "Mirostat1",
    "Mirostat2",
    "Model",
    "NoRepeatNGram",
    "Options",
    "RepetitionPenalty",
    "Sampled",
    "Sampler",
    "SequenceBias",
    "Stage",
    "Step",
    "Suppress",
    "Temperature",
    "TokenEvent",
    "Tokenizer",
    "TopH",
    "TopK",
    "TopNSigma",
    "TopP",
    "Typical",
    "beam_search",
    "generate",
    "kept_log_prob",
    "stream_beam_search",
    "stream_generate",
]
