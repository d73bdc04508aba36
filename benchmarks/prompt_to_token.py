"""`generate`, the command and `score`, compared with transformers and llama.cpp.

CPU-seconds, since the machine may have other work; every item once per round, one after the other.
Each part takes a few minutes and has a file of its own. A round of `score` is one section of the
text, so that a long text can be measured in several runs (--append).
`generate` and `transformers.generate` decode greedily from the same float32 weights and must give
the same tokens. The model with the large vocabulary is a Llama of Gemma-3-270M's sizes with random
weights, written as a Hugging Face folder. llama.cpp itself decodes from its own logits, of the same
file.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from benchmarks.report import MIB, Document
from benchmarks.runner import Run, benchmark, integer, rounds
from lmhead import Sampler, generate, open_model
from lmhead.analysis import score
from lmhead.analysis.score import default_window, windows
from lmhead.analysis.token_text import stream_ids
from lmhead.cli._peak_memory import call_with_growth
from lmhead.models import LanguageModel, bundled, llama_cpp
from lmhead.models.gguf import unpack
from lmhead.sampling.arguments import prompt_ids

GROWTH_TEXT = 16_000  # characters, a few windows: memory does not grow with the text
PROMPT = "The history of the city begins"
# Gemma-3-270M's sizes.
LARGE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 262144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
# Name -> (faster, slower or reference, at least) of CPU-seconds: slower / faster.
GOALS = {
    "generate / transformers": ("generate", "transformers", 1.1),
    "generate --screen / transformers": ("generate --screen", "transformers", 1.25),
    "loop, body / generate": ("generate", "body and head", 0.95),
    "V = 262144, --screen / transformers": ("large --screen", "large transformers", 1.8),
    "command, with / without --screen": ("command --screen", "command", 1 / 0.9),
    "engine llama.cpp / llama.cpp": ("engine llama.cpp", "llama.cpp", 0.9),
    "engine llama.cpp --screen / llama.cpp": ("engine llama.cpp --screen", "llama.cpp", 0.9),
    "score / plain loop": ("score", "score transformers", 1.0),
    "score / body alone": ("score", "score body", 0.9),
}


def write_large(folder: Path, tokenizer: Path) -> Path:
    """Write a Llama of Gemma-3-270M's sizes, with random weights and another model's tokenizer."""
    shutil.copy(tokenizer, folder)
    size, inner, d = LARGE["hidden_size"], LARGE["intermediate_size"], LARGE["head_dim"]
    wide, narrow = LARGE["num_attention_heads"] * d, LARGE["num_key_value_heads"] * d
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (wide, size),
        "self_attn.k_proj": (narrow, size),
        "self_attn.v_proj": (narrow, size),
        "self_attn.o_proj": (size, wide),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    torch.manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(LARGE["vocab_size"], size) * 0.05}
    for i in range(LARGE["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        tensors |= {f"{layer}.{n}.weight": torch.randn(s) * 0.05 for n, s in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{norm}.weight"] = torch.ones(size)
    tensors["model.norm.weight"] = torch.ones(size)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(LARGE))
    return folder


def plain_model(folder: Path) -> Any:
    """Open a folder with transformers, in float32, without an end token."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


class Decode:
    """Greedy decoding of one model in every way."""

    def __init__(self, model: LanguageModel, plain: Any, ids: list[int], tokens: int) -> None:
        self.model, self.plain, self.ids, self.tokens = model, plain, ids, tokens
        self.screened = model.head.screen(cache=True)
        model.head.screened = None

    def ours(self) -> list[int]:
        """Run `generate`."""
        generation = generate(self.model, self.ids, max_new_tokens=self.tokens, eos_token_ids=())
        return list(generation.tokens)

    def screen(self) -> list[int]:
        """Run `generate` with a screened head."""
        self.model.head.screened = self.screened
        sampler = Sampler(do_sample=False)
        generation = generate(
            self.model, self.ids, sampler, max_new_tokens=self.tokens, eos_token_ids=()
        )
        self.model.head.screened = None
        return list(generation.tokens)

    @torch.no_grad()
    def body(self) -> None:
        """Run the body, and the head's query, without the loop of `generate`."""
        hidden, cache = self.model.hidden(torch.tensor([self.ids]))
        for _ in range(self.tokens):
            self.model.head(hidden[:, -1]).ask(top_k=1, logsumexp=True)
            hidden, cache = self.model.hidden(torch.tensor([[5]]), cache)

    def theirs(self) -> list[int]:
        """Run `transformers.generate`."""
        prompt = torch.tensor([self.ids])
        ids = self.plain.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=self.tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return list(ids[0, len(self.ids) :].tolist())


@torch.no_grad()
def plain_score(model: LanguageModel, plain: Any, text: str, window: int) -> float:
    """Return the sum of log-probabilities: all logits of each window, and cross_entropy."""
    total = 0.0
    for ids, new in windows(stream_ids(model, [text]), window, window // 2):
        logits = plain(torch.tensor([ids[:-1]])).logits[0, -new:]
        total -= float(F.cross_entropy(logits, torch.tensor(ids[-new:]), reduction="sum"))
    return total


@torch.no_grad()
def body_score(model: LanguageModel, text: str, window: int) -> None:
    """Run the body on the windows of a text."""
    for ids, _ in windows(stream_ids(model, [text]), window, window // 2):
        model.hidden(torch.tensor([ids[:-1]]), use_cache=False)


def command_seconds(arguments: list[str], threads: int) -> float:
    """Return the CPU-seconds of `lmhead ARGUMENTS` from start to end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "lmhead", *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def cpu(call: Callable[[], object]) -> Callable[[], float]:
    """Return a function that calls and returns the CPU-seconds of this process."""

    def timed() -> float:
        begin = time.process_time()
        call()
        return time.process_time() - begin

    return timed


def measure(run: Run, items: dict[str, Callable[[], float]], rounds: int) -> None:
    """Measure every item once per round, and add the figures to the document."""
    seconds: dict[str, list[float]] = {name: [] for name in items}
    for r in range(rounds):
        for name in items:
            run.progress(f"round {r + 1} of {rounds}: {name}")
            seconds[name].append(items[name]())
    for name, values in seconds.items():
        run.document["seconds"].setdefault(name, []).extend(values)


def lines(document: Document, width: int) -> list[str]:  # noqa: ARG001
    """Return the ratios, each with its goal, and the times."""
    shown = [f"{'ratio of speeds':<40}{'measured':>10}{'goal':>10}"]
    for name, entry in document["ratios"].items():
        shown.append(f"{name:<40}{entry['ratio']:>10.2f}{entry['goal']:>10.2f}")
    shown += ["", f"{'CPU-seconds, median':<40}"]
    shown += [f"{name:<40}{median(t):>10.2f}" for name, t in document["seconds"].items()]
    if document["part"] != "score":
        return [*shown, "", f"the same tokens: {document['same_tokens']}"]
    growth, model = max(document["growth_bytes"], default=0) / MIB, document["model_bytes"] / MIB
    off, count = max(document["score_difference"]), sum(document["scored_tokens"])
    return [
        *shown,
        "",
        f"{count:,} tokens, {growth:.0f} MiB beyond the {model:.0f} MiB of the weights",
        f"relative difference of the sums of log-probabilities: {off:.1e}",
    ]


def add_ratios(run: Run) -> None:
    """Add the ratios of what has been measured so far to the document, and write it."""
    seconds = run.document["seconds"]
    run.document["ratios"] = {
        name: {
            "ratio": median(b / a for a, b in zip(seconds[fast], seconds[slow], strict=True)),
            "goal": goal,
        }
        for name, (fast, slow, goal) in GOALS.items()
        if fast in seconds
    }
    run.wrong = not all(run.document["same_tokens"].values())
    run.save()  # an interrupted run keeps its completed parts


def small(run: Run, file: Path, tokens: int, rounds: int) -> None:
    """Measure `generate` with smollm2."""
    model = open_model("smollm2")
    both = Decode(model, plain_model(unpack(file)), prompt_ids(PROMPT, model.tokenizer), tokens)
    run.document["same_tokens"]["smollm2"] = both.ours() == both.theirs() == both.screen()
    items = {
        "generate": cpu(both.ours),
        "generate --screen": cpu(both.screen),
        "body and head": cpu(both.body),
        "transformers": cpu(both.theirs),
    }
    measure(run, items, rounds)


def as_command(run: Run, tokens: int, rounds: int) -> None:
    """Measure `lmhead generate smollm2` from start to end."""
    options = ["generate", "smollm2", PROMPT, "-n", str(tokens), "--ignore-eos"]
    threads = torch.get_num_threads()
    items = {
        "command": lambda: command_seconds(options, threads),
        "command --screen": lambda: command_seconds([*options, "--screen"], threads),
    }
    items["command --screen"]()  # the first one makes the quantized copy
    measure(run, items, rounds)


class LlamaCpp:
    """llama.cpp by itself: greedy decoding from its own logits, through its C interface."""

    def __init__(self, file: Path, vocab_size: int, ids: list[int], tokens: int) -> None:
        self.vocab_size, self.ids, self.tokens = vocab_size, ids, tokens
        self.library = llama_cpp._library()
        number = ctypes.c_int32
        self.logits = self.library._function(
            "llama_get_logits_ith", ctypes.c_void_p, ctypes.c_void_p, number
        )
        self.model = self.library.load(str(file).encode(), self.library.model_params())

    def decode(self) -> list[int]:
        """Return the tokens."""
        params = self.library.context_params()
        params.numbers[0] = 1024
        context = self.library.context(self.model, params)
        threads = torch.get_num_threads()
        self.library.set_threads(context, threads, threads)
        tokens: list[int] = []
        new = self.ids
        while len(tokens) < self.tokens:
            buffer = (ctypes.c_int32 * len(new))(*new)
            failed = self.library.decode(
                context, self.library.batch(ctypes.addressof(buffer), len(new))
            )
            assert not failed, failed
            row = (ctypes.c_float * self.vocab_size).from_address(self.logits(context, -1))
            tokens.append(int(torch.frombuffer(row, dtype=torch.float32).argmax()))
            new = tokens[-1:]
        self.library.free_context(context)
        return tokens


def engine(run: Run, file: Path, tokens: int, rounds: int) -> None:
    """Measure `generate` on the body of llama.cpp, and llama.cpp itself."""
    model = open_model("smollm2", engine="llama.cpp")
    ids = prompt_ids(PROMPT, model.tokenizer)
    ours = Decode(model, None, ids, tokens)
    theirs = LlamaCpp(file, model.head.vocab_size, ids, tokens)
    run.document["same_tokens"]["llama.cpp"] = ours.ours() == ours.screen()
    items = {
        "engine llama.cpp": cpu(ours.ours),
        "engine llama.cpp --screen": cpu(ours.screen),
        "llama.cpp": cpu(theirs.decode),
    }
    theirs.decode()
    measure(run, items, rounds)


def large(run: Run, file: Path, tokens: int, rounds: int) -> None:
    """Measure `generate` with a model of 262144 tokens."""
    with tempfile.TemporaryDirectory() as folder:
        run.progress("writing a model with 262144 tokens")
        model_folder = write_large(Path(folder), unpack(file) / "tokenizer.json")
        both = Decode(
            open_model(model_folder), plain_model(model_folder), list(range(9, 17)), tokens
        )
        same = both.ours() == both.theirs() == both.screen()
        run.document["same_tokens"]["V = 262144"] = same
        items = {
            "large --screen": cpu(both.screen),
            "large transformers": cpu(both.theirs),
        }
        measure(run, items, rounds)


def score_section(run: Run, model: LanguageModel, plain: Any, text: str) -> None:
    """Measure `score` on one section, and compare its sum with that of the plain loop."""
    results: dict[str, Any] = {}
    window = default_window(model)
    items = {
        "score": cpu(lambda: results.update(ours=score(model, text))),
        "score transformers": cpu(
            lambda: results.update(dense=plain_score(model, plain, text, window))
        ),
        "score body": cpu(lambda: body_score(model, text, window)),
    }
    measure(run, items, 1)
    run.document["scored_tokens"].append(results["ours"].tokens)
    run.document["score_difference"].append(abs(results["ours"].log_prob / results["dense"] - 1))
    add_ratios(run)


def text_score(run: Run, file: Path, sections: list[str], append: bool, rounds: int) -> None:
    """Measure `score` with smollm2: one section of the text per round."""
    old = json.loads(run.path.read_text()) if append and run.path.exists() else {}
    done = len(old.get("scored_tokens", []))
    for name in ("scored_tokens", "score_difference", "growth_bytes"):
        run.document[name] = old.get(name, [])
    run.document["seconds"] = old.get("seconds", {})
    model = open_model("smollm2")
    parts: tuple[Any, ...] = (model.body, model.head)
    weights = {id(p): p for part in parts for p in part.parameters()}
    size = sum(p.numel() * p.element_size() for p in weights.values())
    run.document["model_bytes"] = size
    score(model, sections[0][:9000])  # loads what is loaded once
    _, growth = call_with_growth(lambda: score(model, sections[done][:GROWTH_TEXT]))
    run.document["growth_bytes"].append(growth)
    plain = plain_model(unpack(file))
    for text in sections[done : done + rounds]:
        score_section(run, model, plain, text)
    run.wrong = max(run.document["score_difference"]) > 1e-5


@benchmark("prompt-to-token", "from a prompt to tokens, beside others", lines, quick=True)
@click.argument("part", type=click.Choice(["generate", "command", "large", "engine", "score"]))
@integer("--tokens", 64, "Number of new tokens; a quarter of it with `large`.")
@click.option("--text", type=click.Path(exists=True, path_type=Path), help="Text to score.")
@integer("--section", 5000, "About how many tokens of the text are scored in a round.")
@click.option("--append", is_flag=True, help="Continue the file of `score` with the next sections.")
@rounds(3)
def command(
    run: Run, part: str, tokens: int, text: Path | None, section: int, append: bool, rounds: int
) -> None:
    """Time `generate`, `score` and the command, compared with transformers and llama.cpp.

    PART is what to measure.

    \b
    generate  `generate` with smollm2
    command   `lmhead generate smollm2`, with and without --screen
    large     `generate` with a model of 262144 tokens
    engine    `generate` on llama.cpp's body, and llama.cpp itself
    score     `score` with smollm2, one section of a text per round

    Needs transformers and `lmhead models add smollm2`. Ends with 1 if the tokens differ.
    """
    if run.quick:
        tokens, section, rounds = 8, 600, 1
    file = bundled.find("smollm2")
    if file is None:
        raise ValueError("smollm2 must be installed: lmhead models add smollm2")
    run.name = f"prompt-to-token-{part}"
    run.document |= {"part": part, "seconds": {}, "same_tokens": {}, "ratios": {}}
    if part == "score":
        if text is None:
            raise ValueError("score needs --text")
        content, size = text.read_text(encoding="utf-8"), 4 * section
        sections = [content[i : i + size] for i in range(0, len(content), size)]
        run.document |= {"text": text.name, "section": section}
        text_score(run, file, sections, append, rounds)
    elif part == "large":
        large(run, file, tokens // 4, rounds)
    elif part == "command":
        as_command(run, tokens, rounds)
    elif part == "engine":
        engine(run, file, tokens, rounds)
    else:
        small(run, file, tokens, rounds)
    if part != "score":
        run.document["tokens"] = tokens // 4 if part == "large" else tokens
        add_ratios(run)
