"""`transformers.generate` with an `LMHead`: the tokens of `nn.Linear`, in every mode, and under the
grammar processors of xgrammar, llguidance and outlines-core.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from torch import Tensor

from zoo.tiny_llama import VOCAB, llama, tokenizer

# Tokens and noise are compared; that a sampler builds a few rows is not the subject here.
pytestmark = pytest.mark.filterwarnings("ignore")

PROMPT = torch.tensor([[5, 9, 8, 30, 9, 8], [21, 4, 4, 17, 33, 6]])
NEW = 10


@pytest.fixture(autouse=True)
def transformers() -> Any:
    return pytest.importorskip("transformers")


def generated(model: Any, prompt: Tensor = PROMPT, **options: Any) -> Any:
    torch.manual_seed(11)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=options.pop("max_new_tokens", NEW),
            pad_token_id=0,
            **options,
        )


SAMPLE = {"do_sample": True, "temperature": 1.3, "top_k": 0}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "greedy without cache": {"do_sample": False, "use_cache": False},
    "sample": SAMPLE,
    "sample several": {**SAMPLE, "num_return_sequences": 3},
    "top_k": {**SAMPLE, "top_k": 7},
    "top_p": {**SAMPLE, "top_p": 0.7},
    "min_p": {**SAMPLE, "min_p": 0.1},
    "typical_p": {**SAMPLE, "typical_p": 0.6},
    "epsilon_cutoff": {**SAMPLE, "epsilon_cutoff": 0.02},
    "eta_cutoff": {**SAMPLE, "eta_cutoff": 0.03},
    "top_h": {**SAMPLE, "top_h": 0.5},
    "all warpers": {**SAMPLE, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95},
    "beam": {"num_beams": 3, "do_sample": False},
    "beam several": {"num_beams": 4, "num_return_sequences": 3, "do_sample": False},
    "beam early stopping": {"num_beams": 3, "early_stopping": True, "length_penalty": 0.5},
    "beam sample": {**SAMPLE, "num_beams": 3},
    "remove_invalid_values": {"do_sample": False, "remove_invalid_values": True},
    "renormalize_logits": {**SAMPLE, "top_k": 9, "renormalize_logits": True},
    "repetition_penalty": {"do_sample": False, "repetition_penalty": 1.5},
    "encoder_repetition_penalty": {"do_sample": False, "encoder_repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"do_sample": False, "no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"do_sample": False, "encoder_no_repeat_ngram_size": 2},
    "bad_words_ids": {"do_sample": False, "bad_words_ids": [[9], [8, 30]]},
    "sequence_bias": {"do_sample": False, "sequence_bias": {(12,): 3.0, (7, 8): -5.0}},
    "suppress_tokens": {"do_sample": False, "suppress_tokens": list(range(10, 30))},
    "begin_suppress_tokens": {"do_sample": False, "begin_suppress_tokens": [4, 5, 6, 7]},
    "forced_bos": {"do_sample": False, "forced_bos_token_id": 7},
    "forced_eos": {"do_sample": False, "forced_eos_token_id": 2},
    "min_length": {"do_sample": False, "min_length": 12},
    "min_new_tokens": {"do_sample": False, "min_new_tokens": 8},
    "exponential_decay": {"do_sample": False, "exponential_decay_length_penalty": (3, 1.5)},
    "guidance_scale": {"do_sample": False, "guidance_scale": 1.7},
    "prefix_allowed_tokens": {
        "do_sample": False,
        "prefix_allowed_tokens_fn": lambda row, _: [5 + row, 9, 40, 41],
    },
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3, "batch": 1},
    "prompt lookup sampled": {**SAMPLE, "prompt_lookup_num_tokens": 3, "batch": 1},
    "scores": {"do_sample": False, "output_scores": True, "return_dict_in_generate": True},
    "raw logits": {"do_sample": False, "output_logits": True, "return_dict_in_generate": True},
    "beam scores": {
        "num_beams": 3,
        "do_sample": False,
        "output_scores": True,
        "return_dict_in_generate": True,
    },
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_tokens(mode: str, seed: int) -> None:
    options = dict(MODES[mode])
    prompt = PROMPT[: options.pop("batch", 2)]
    theirs = generated(llama("dense", seed), prompt, **options)
    ours = generated(llama("lazy", seed), prompt, **options)
    if isinstance(theirs, Tensor):
        assert ours.tolist() == theirs.tolist()
        return
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    for name in ("scores", "logits"):
        if getattr(theirs, name, None) is not None:
            for step, (a, e) in enumerate(
                zip(getattr(ours, name), getattr(theirs, name), strict=True)
            ):
                assert_close(
                    a.float().cpu().numpy(), e, rtol=1e-4, atol=1e-4, what=f"{name} of step {step}"
                )


def test_the_modes_do_different_things() -> None:
    """A mode that changes nothing would test nothing."""
    outputs = {}
    for mode in ("greedy", "sample", "top_p", "typical_p", "beam", "repetition_penalty"):
        outputs[mode] = str(generated(llama("dense"), **MODES[mode]).tolist())
    assert len(set(outputs.values())) >= 5


@pytest.mark.parametrize("options", [{"do_sample": False}, SAMPLE], ids=["greedy", "sample"])
@pytest.mark.parametrize("kinds", [("lazy", "dense"), ("dense", "lazy"), ("lazy", "lazy")])
def test_assisted(kinds: tuple[str, str], options: dict[str, Any]) -> None:
    """Target and assistant, either or both with an `LMHead`."""
    prompt = PROMPT[:1]

    def text(target: str, assistant: str) -> list[Any]:
        helper = llama(assistant, seed=1)
        helper.generation_config.num_assistant_tokens = 4
        helper.generation_config.num_assistant_tokens_schedule = "constant"
        out: list[Any] = generated(
            llama(target), prompt, assistant_model=helper, **options
        ).tolist()
        return out

    assert text(*kinds) == text("dense", "dense")


def test_compute_transition_scores() -> None:
    found = []
    for kind in ("dense", "lazy"):
        model = llama(kind)
        out = generated(model, do_sample=False, output_scores=True, return_dict_in_generate=True)
        found.append(
            model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        )
    assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_streamed_tokens() -> None:
    from transformers import TextStreamer

    class Collect(TextStreamer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(tokenizer())
            self.text = ""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: ARG002
            self.text += text

    texts = []
    for kind in ("dense", "lazy"):
        streamer = Collect()
        generated(llama(kind), PROMPT[:1], do_sample=False, streamer=streamer)
        texts.append(streamer.text)
    assert texts[0] == texts[1] != ""


def test_custom_processor_that_writes() -> None:
    """A user's processor that changes the scores in place and returns them."""

    def penalise(ids: Tensor, scores: Any) -> Any:
        scores.div_(1.5)
        scores[:, ids[0, -1]] = float("-inf")
        scores.masked_fill_(torch.arange(VOCAB) % 7 == 0, float("-inf"))
        return scores

    theirs, ours = (
        generated(llama(kind), do_sample=False, logits_processor=[penalise])
        for kind in ("dense", "lazy")
    )
    assert ours.tolist() == theirs.tolist()
    assert ours.tolist() != generated(llama("dense"), do_sample=False).tolist()
    assert (ours[:, PROMPT.shape[1] :] % 7 != 0).all() or bool((ours == 0).any())


# --- sampling loops -------------------------------------------------------------------------------


def nanogpt(model: Any, ids: Tensor) -> Tensor:
    for _ in range(NEW):
        logits = model(ids).logits[:, -1, :] / 0.9
        v, _ = torch.topk(logits, min(12, logits.size(-1)))
        logits[logits < v[:, [-1]]] = -float("Inf")
        probabilities = F.softmax(logits, dim=-1)
        ids = torch.cat((ids, torch.multinomial(probabilities, num_samples=1)), dim=1)
    return ids


def mingpt(model: Any, ids: Tensor) -> Tensor:
    for step in range(NEW):
        logits = model(ids).logits[:, -1, :] / 1.2
        out = logits.clone()
        v, _ = torch.topk(logits, 9)
        out[out < v[:, [-1]]] = -float("Inf")
        probabilities = F.softmax(out, dim=-1)
        if step % 2:
            following = torch.multinomial(probabilities, num_samples=1)
        else:
            _, following = torch.topk(probabilities, k=1, dim=-1)
        ids = torch.cat((ids, following), dim=1)
    return ids


def top_p_loop(model: Any, ids: Tensor) -> Tensor:
    for _ in range(NEW):
        logits = model(ids).logits[:, -1]
        logits /= 1.1
        ordered, index = torch.sort(logits, descending=True)
        remove = torch.cumsum(F.softmax(ordered, -1), -1) > 0.8
        remove[..., 1:] = remove[..., :-1].clone()
        remove[..., 0] = 0
        logits[remove.scatter(1, index, remove)] = float("-inf")
        following = torch.multinomial(F.softmax(logits, -1), 1)
        ids = torch.cat((ids, following), dim=1)
    return ids


@pytest.mark.parametrize("loop", [nanogpt, mingpt, top_p_loop], ids=lambda f: f.__name__)
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "grad"])
def test_sampling_loops(loop: Callable[[Any, Tensor], Tensor], mode: str) -> None:
    contexts = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "grad": torch.enable_grad,
    }
    found = []
    for kind in ("dense", "lazy"):
        model = llama(kind)
        torch.manual_seed(4)
        with contexts[mode]():
            found.append(loop(model, PROMPT).tolist())
    assert found[1] == found[0]


# --- grammars -------------------------------------------------------------------------------------

# The language of the tests: t7, then any number of t10 .. t13, then t8 or t9, then the end.
PATTERN = r"(t7)( t1[0-3])*( t[89])"


def fits(ids: list[int], complete: bool) -> bool:
    new = [i for i in ids if i not in (0,)]
    if new and new[-1] == 2:
        new, complete = new[:-1], True
    text = " ".join(f"t{i}" for i in new)
    return bool(re.fullmatch(PATTERN if complete else r"(t7)( t1[0-3])*( t[89])?", text))


@pytest.fixture
def eager_kernels() -> Iterator[None]:
    """Kernels that are wrapped in `torch.compile` run as written."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def check_grammar(processor: Callable[[], Any]) -> None:
    for options in ({"do_sample": False}, SAMPLE):
        theirs, ours = (
            generated(llama(kind), logits_processor=[processor()], max_new_tokens=6, **options)
            for kind in ("dense", "lazy")
        )
        assert ours.tolist() == theirs.tolist()
        for row in ours[:, PROMPT.shape[1] :].tolist():
            assert fits(row, complete=False), row


class Allowed:
    """Next tokens of the language, as a bitmask of 32-bit integers."""

    def __init__(self, width: int) -> None:
        self.width = width

    def bitmask(self, ids: Tensor) -> Tensor:
        rows = []
        for row in ids[:, PROMPT.shape[1] :].tolist():
            allowed = [7] if not row else [10, 11, 12, 13, 8, 9]
            if row and row[-1] in (8, 9, 2, 0):
                allowed = [2]
            bits = [0] * self.width
            for token in allowed:
                bits[token // 32] |= 1 << (token % 32)
            rows.append(bits)
        words = torch.tensor(rows, dtype=torch.int64)
        return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def test_xgrammar_kernel() -> None:
    """Writes through the data pointer."""
    xgrammar = pytest.importorskip("xgrammar")
    language = Allowed((VOCAB + 31) // 32)

    def processor(ids: Tensor, scores: Any) -> Any:
        xgrammar.apply_token_bitmask_inplace(scores, language.bitmask(ids))
        return scores

    check_grammar(lambda: processor)


def test_xgrammar_processor() -> None:
    """Its own processor for `generate`, with a grammar compiled for the tokenizer."""
    xgrammar = pytest.importorskip("xgrammar")
    hf = pytest.importorskip("xgrammar.contrib.hf")
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f" t{i}" for i in range(4, VOCAB))]
    info = xgrammar.TokenizerInfo(words, vocab_size=VOCAB, stop_token_ids=[2])
    compiled = xgrammar.GrammarCompiler(info).compile_grammar(
        'root ::= " t7" (" t10" | " t11" | " t12" | " t13")* (" t8" | " t9")'
    )
    check_grammar(lambda: hf.LogitsProcessor(compiled))


@pytest.mark.usefixtures("eager_kernels")
@pytest.mark.parametrize("width", [2, 1])
def test_llguidance_kernel(width: int) -> None:
    """Writes through torch; a mask narrower than the vocabulary forbids the rest."""
    kernel = pytest.importorskip("llguidance.torch")
    language = Allowed(width)

    def processor(ids: Tensor, scores: Any) -> Any:
        kernel.apply_token_bitmask_inplace(scores, language.bitmask(ids))
        return scores

    check_grammar(lambda: processor)


@pytest.mark.usefixtures("eager_kernels")
def test_llguidance_matcher() -> None:
    """A regular expression compiled for a tokenizer, one matcher per row.

    Token i is the character 61 + i, so that every text has one tokenization: D[G-J]*[EF].
    """
    llguidance = pytest.importorskip("llguidance")
    kernel = pytest.importorskip("llguidance.torch")
    special = [b"\xff<pad>", b"\xff<s>", b"\xff</s>", b"\xff<unk>"]

    class Characters:
        eos_token_id, bos_token_id = 2, 1
        special_token_ids = (0, 1, 2, 3)
        tokens = (*special, *(bytes([61 + i]) for i in range(4, VOCAB)))

        def __call__(self, text: str) -> list[int]:
            return [ord(character) - 61 for character in text]

    wrapper = llguidance.TokenizerWrapper(Characters())
    tokens = llguidance.LLTokenizer(wrapper, n_vocab=VOCAB)
    grammar = llguidance.LLMatcher.grammar_from_regex("D[G-J]*[EF]")

    def make() -> Any:
        matchers = [llguidance.LLMatcher(tokens, grammar) for _ in range(len(PROMPT))]
        bitmask = kernel.allocate_token_bitmask(len(PROMPT), VOCAB)

        def processor(ids: Tensor, scores: Any) -> Any:
            for row, matcher in enumerate(matchers):
                if ids.shape[1] > PROMPT.shape[1] and not matcher.is_stopped():
                    matcher.consume_token(int(ids[row, -1]))
                kernel.fill_next_token_bitmask(matcher, bitmask, row)
            kernel.apply_token_bitmask_inplace(scores, bitmask)
            return scores

        return processor

    check_grammar(make)


@pytest.mark.usefixtures("eager_kernels")
def test_outlines_core_kernel() -> None:
    kernel = pytest.importorskip("outlines_core.kernels.torch")
    language = Allowed((VOCAB + 31) // 32)

    def processor(ids: Tensor, scores: Any) -> Any:
        for row, mask in enumerate(language.bitmask(ids)):
            kernel.apply_token_bitmask_inplace(scores[row : row + 1], mask[None])
        return scores

    check_grammar(lambda: processor)


@pytest.mark.usefixtures("eager_kernels")
def test_outlines_core_guide() -> None:
    """An index compiled from a regular expression; one sequence at a time."""
    core = pytest.importorskip("outlines_core")
    kernel = pytest.importorskip("outlines_core.kernels.torch")
    vocabulary = core.Vocabulary(2, {f" t{i}": [i] for i in range(4, VOCAB)})
    index = core.Index(r" t7( t1[0-3])*( t[89])", vocabulary)

    def make() -> Any:
        guides = [core.Guide(index) for _ in range(len(PROMPT))]

        def processor(ids: Tensor, scores: Any) -> Any:
            masks = []
            for row, guide in enumerate(guides):
                if ids.shape[1] > PROMPT.shape[1] and not guide.is_finished():
                    guide.advance(int(ids[row, -1]), return_tokens=False)
                mask = kernel.allocate_token_bitmask(VOCAB)
                kernel.fill_next_token_bitmask(guide, mask)
                masks.append(mask)
            kernel.apply_token_bitmask_inplace(scores, torch.cat(masks))
            return scores

        return processor

    check_grammar(make)


@pytest.mark.parametrize("library", ["llguidance.torch", "outlines_core.kernels.torch"])
def test_compiled_kernels(library: str) -> None:
    """The kernels as they come, inside `torch.compile`: the mask is applied."""
    kernel = pytest.importorskip(library)
    language = Allowed((VOCAB + 31) // 32)
    ids = PROMPT
    found = []
    for kind in ("dense", "lazy"):
        with torch.no_grad():
            scores = llama(kind)(ids).logits[:, -1, :]
            scores = scores.clone() if kind == "dense" else scores
            kernel.apply_token_bitmask_inplace(scores, language.bitmask(ids))
            found.append(scores.argmax(-1).tolist())
    assert found[0] == found[1] == [7, 7]


def test_mask_tokens_of_a_bitmask() -> None:
    """The int32 mask of the grammar engines; one narrower than the vocabulary forbids the rest."""
    model = llama("lazy")
    with torch.no_grad():
        dense = llama("dense")(PROMPT).logits[:, -1, :]
        for width in (1, 2):
            z = model(PROMPT).logits[:, -1, :].mask_tokens(Allowed(width).bitmask(PROMPT))
            assert z.argmax(-1).tolist() == [7, 7]
            assert_close(z.logsumexp(-1), dense[:, 7], atol=1e-6)
            assert_close(z.softmax(-1)[:, 7], torch.ones(2), rtol=1e-6)
        every = torch.full((2, 2), -1, dtype=torch.int32)
        z = model(PROMPT).logits[:, -1, :].mask_tokens(every)
        assert_close(z.logsumexp(-1), dense.logsumexp(-1), rtol=1e-5)


@pytest.mark.parametrize("shape", [(VOCAB,), (2, VOCAB)])
def test_mask_tokens_of_booleans(shape: tuple[int, ...]) -> None:
    kept = [3, 9, 20]
    allowed = torch.zeros(shape, dtype=torch.bool)
    allowed[..., kept] = True
    with torch.no_grad():
        z = llama("lazy")(PROMPT).logits[:, -1, :].mask_tokens(allowed)
        expected = llama("dense")(PROMPT).logits[:, -1, :].masked_fill(~allowed, float("-inf"))
        assert z.argmax(-1).tolist() == expected.argmax(-1).tolist()
        assert_close(z.logsumexp(-1), expected.logsumexp(-1), rtol=1e-5)
        assert_close(z.softmax(-1)[:, kept], expected.softmax(-1)[:, kept], atol=1e-6)
        assert z.topk(3).indices.sort(-1).values.tolist() == [kept] * 2
