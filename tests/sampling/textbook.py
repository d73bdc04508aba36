"""A whole chain as a composition of plain definitions, in the sequence of each program.

Written from the programs' sources, not from `lmhead.sampling.stage_order`: a second opinion.

    hf         biases, penalties, bans, temperature, then the cuts
    vllm       bans and biases, penalties, temperature, min-p, then top-k and top-p
    llama.cpp  biases, penalties, DRY, the cuts, temperature last
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from compare import Array

from lmhead import reference as ref

_SEQUENCES = {
    "hf": """guidance_scale sequence_bias logit_bias repetition_penalty frequency_penalty
        presence_penalty dry_multiplier no_repeat_ngram_size bad_words_ids min_length min_new_tokens
        allowed_token_ids forced_tokens suppress_tokens begin_suppress_tokens
        temperature top_n_sigma top_h top_k top_p min_p typical_p epsilon_cutoff eta_cutoff
        xtc_probability mirostat""",
    "vllm": """allowed_token_ids bad_words_ids min_new_tokens logit_bias
        repetition_penalty frequency_penalty presence_penalty
        temperature min_p top_k top_p""",
    "llama.cpp": """logit_bias repetition_penalty frequency_penalty presence_penalty dry_multiplier
        top_n_sigma top_k typical_p top_p min_p xtc_probability temperature mirostat""",
}


class Textbook:
    """`Textbook(order, options)(logits, contexts, prompts)` is what `Sampler.process` should give.

    Options for one row; numbers, not lists. `coins` (B,) are XTC's, `mu` (B,) mirostat's.
    """

    def __init__(self, order: str, options: dict[str, Any]) -> None:
        unknown = set(options) - set(dir(self)) - set(_PART_OF_ANOTHER)
        assert not unknown, f"the textbook has no {unknown}"
        missing = set(options) - set(_SEQUENCES[order].split()) - set(_PART_OF_ANOTHER)
        assert not missing, f"{order} has no {missing}"
        self.order, self.o = order, options
        self.keep = options.get("min_tokens_to_keep", 1)

    def __call__(
        self,
        logits: Array,
        contexts: Sequence[Sequence[int]] | None = None,
        prompts: Sequence[int] | None = None,
        *,
        unconditional: Array | None = None,
        coins: Array | None = None,
        mu: Array | None = None,
    ) -> Array:
        self.contexts = [list(c) for c in contexts] if contexts is not None else [[]] * len(logits)
        self.lengths = np.array([len(c) for c in self.contexts])
        self.prompts = self.lengths if prompts is None else np.array(prompts)
        self.unconditional, self.coins, self.mu = unconditional, coins, mu
        z = logits
        for name in _SEQUENCES[self.order].split():
            if name in self.o:
                step: Callable[[Array], Array] = getattr(self, name)
                z = step(z)
        return z

    def _last(self, ids: list[list[int]], option: str) -> list[list[int]]:
        n = self.o.get(option, 64 if self.order == "llama.cpp" and option[0] == "p" else -1)
        return ids if n == -1 else [row[max(0, len(row) - n) :] for row in ids]

    @property
    def _contexts(self) -> list[list[int]]:
        """Prompt and output."""
        return self._last(self.contexts, "penalty_last_n")

    @property
    def _counted(self) -> list[list[int]]:
        """What frequency and presence penalties count: llama.cpp does not know what a prompt is."""
        if self.order == "llama.cpp":
            return self._contexts
        outputs = [c[n:] for c, n in zip(self.contexts, self.prompts, strict=True)]
        return self._last(outputs, "penalty_last_n")

    def guidance_scale(self, z: Array) -> Array:
        assert self.unconditional is not None
        return ref.guidance(z, self.unconditional, self.o["guidance_scale"])

    def sequence_bias(self, z: Array) -> Array:
        return ref.sequence_bias(z, self.contexts, self.o["sequence_bias"])

    def logit_bias(self, z: Array) -> Array:
        return ref.logit_bias(z, self.o["logit_bias"])

    def repetition_penalty(self, z: Array) -> Array:
        return ref.repetition_penalty(z, self._contexts, self.o["repetition_penalty"])

    def frequency_penalty(self, z: Array) -> Array:
        return ref.frequency_penalty(z, self._counted, self.o["frequency_penalty"])

    def presence_penalty(self, z: Array) -> Array:
        return ref.presence_penalty(z, self._counted, self.o["presence_penalty"])

    def dry_multiplier(self, z: Array) -> Array:
        breakers = self.o.get("dry_sequence_breakers", ())
        return ref.dry_penalty(
            z,
            self._last(self.contexts, "dry_penalty_last_n"),
            multiplier=self.o["dry_multiplier"],
            base=self.o.get("dry_base", 1.75),
            allowed_length=self.o.get("dry_allowed_length", 2),
            sequence_breakers=[[b] if isinstance(b, int) else list(b) for b in breakers],
        )

    def no_repeat_ngram_size(self, z: Array) -> Array:
        return ref.no_repeat_ngram_filter(z, self.contexts, self.o["no_repeat_ngram_size"])

    def bad_words_ids(self, z: Array) -> Array:
        ends = self.o.get("eos_token_id", [])
        return ref.bad_words_filter(z, self.contexts, self.o["bad_words_ids"], eos_token_id=ends)

    def min_length(self, z: Array) -> Array:
        ends = self.o["eos_token_id"]
        return ref.min_length_filter(z, self.lengths, self.o["min_length"], ends)

    def min_new_tokens(self, z: Array) -> Array:
        new, ends = self.lengths - self.prompts, self.o["eos_token_id"]
        return ref.min_length_filter(z, new, self.o["min_new_tokens"], ends)

    def allowed_token_ids(self, z: Array) -> Array:
        return ref.allowed_filter(z, self.o["allowed_token_ids"])

    def forced_tokens(self, z: Array) -> Array:
        return ref.forced_tokens(z, self.lengths, self.o["forced_tokens"])

    def suppress_tokens(self, z: Array) -> Array:
        return ref.suppress_filter(z, self.o["suppress_tokens"])

    def begin_suppress_tokens(self, z: Array) -> Array:
        ids = self.o["begin_suppress_tokens"]
        return ref.begin_suppress_filter(z, ids, self.lengths, self.prompts)

    def temperature(self, z: Array) -> Array:
        t, spread = self.o["temperature"], self.o.get("dynatemp_range", 0.0)
        if spread:
            return ref.dynamic_temperature(z, t, spread, self.o.get("dynatemp_exponent", 1.0))
        return ref.temperature_scale(z, t)

    def top_n_sigma(self, z: Array) -> Array:
        return ref.top_n_sigma_filter(z, self.o["top_n_sigma"])

    def top_h(self, z: Array) -> Array:
        return ref.top_h_filter(z, self.o["top_h"])

    def top_k(self, z: Array) -> Array:
        return ref.top_k_filter(z, self.o["top_k"], min_tokens_to_keep=self.keep)

    def top_p(self, z: Array) -> Array:
        return ref.top_p_filter(z, self.o["top_p"], min_tokens_to_keep=self.keep)

    def min_p(self, z: Array) -> Array:
        return ref.min_p_filter(z, self.o["min_p"], min_tokens_to_keep=self.keep)

    def typical_p(self, z: Array) -> Array:
        return ref.typical_filter(z, self.o["typical_p"], min_tokens_to_keep=self.keep)

    def epsilon_cutoff(self, z: Array) -> Array:
        return ref.epsilon_filter(z, self.o["epsilon_cutoff"], min_tokens_to_keep=self.keep)

    def eta_cutoff(self, z: Array) -> Array:
        return ref.eta_filter(z, self.o["eta_cutoff"], min_tokens_to_keep=self.keep)

    def xtc_probability(self, z: Array) -> Array:
        assert self.coins is not None
        return ref.xtc_filter(
            z,
            self.coins,
            probability=self.o["xtc_probability"],
            threshold=self.o.get("xtc_threshold", 0.1),
            min_tokens_to_keep=self.keep,
        )

    def mirostat(self, z: Array) -> Array:
        mu = 2 * self.o.get("mirostat_tau", 5.0) if self.mu is None else self.mu
        filters = {1: ref.mirostat_1_filter, 2: ref.mirostat_2_filter}
        return filters[self.o["mirostat"]](z, mu)


_PART_OF_ANOTHER = (
    "dynatemp_range",
    "dynatemp_exponent",
    "xtc_threshold",
    "mirostat_tau",
    "mirostat_eta",
    "penalty_last_n",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "eos_token_id",
    "min_tokens_to_keep",
)
