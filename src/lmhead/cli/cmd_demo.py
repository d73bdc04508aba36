"""`lmhead demo`: a tour of lmhead on a real model, in under a minute.

Next tokens, surprisal of a sentence, certified decode with the bytes it saves, and the memory that
a training step saves. Every figure is measured while the demo runs.
"""

from __future__ import annotations

import math
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lmhead.cli._command_group import choice_option
from lmhead.cli._model_arguments import open_model
from lmhead.cli._peak_memory import peak_growth
from lmhead.cli._terminal import Narration, bar, cyan, echo, left, right, visible_bytes
from lmhead.cli.cmd_check import require_lm_head
from lmhead.errors import ModelError
from lmhead.models import bundled
from lmhead.progress import Progress

if TYPE_CHECKING:
    from lmhead.models import LanguageModel
    from lmhead.models.language_model import TextTokenizer

PROMPT = "The capital of France is"
SENTENCE = "The sun rises in the east and sets in the refrigerator."
STORY = "Once upon a time, there was a"
TOKENS = 40
STEP = 512  # tokens of the training step
_BAR = 30
MARGIN = Narration.margin


@click.command()
@click.option("--toy", is_flag=True, help="A toy model of 6 words, with every sum written out.")
@choice_option("--lang", choices=("en", "zh"), default="en", help="Language of the text.")
@click.option("--model", help="Model.  [default: smollm2 if it is installed, else tiny]")
def command(toy: bool, lang: str, model: str | None) -> None:
    """Show what lmhead does, on a real model, in under a minute.

    Next tokens, surprisal of a sentence, certified decode and the bytes it saves, the memory that a
    training step saves. With --toy, a hidden state becomes a word step by step, with a model small
    enough to follow by hand.

    \b
    Examples:
      lmhead demo
      lmhead demo --model ./Qwen3-0.6B
      lmhead demo --toy
      lmhead demo --toy --lang zh
    """
    if not toy and model is None:
        try:
            model = bundled.default_model()
        except ModelError as error:
            click.echo(f"{str(error).capitalize()}. Running the toy demo instead.", err=True)
            toy = True
    if toy:
        from lmhead.cli._toy_demo import ToyDemo

        echo(ToyDemo(lang).lines())
        return
    opened = open_model(model)
    if opened.tokenizer is None:
        raise ModelError(f"{opened.name} has no tokenizer; the demo needs one")
    require_lm_head(opened)
    tour = Tour(opened, opened.tokenizer, chinese=lang == "zh")
    echo(tour.title())
    for section in (tour.next_token, tour.surprisal, tour.certified, tour.memory, tour.farewell):
        with Progress() as progress:
            progress("...")
            lines = list(section())
        echo(lines)


class Tour(Narration):
    """The sections of the demo on one model, each as lines."""

    def __init__(self, model: LanguageModel, tokenizer: TextTokenizer, *, chinese: bool) -> None:
        super().__init__(chinese=chinese)
        self.model, self.tokenizer = model, tokenizer

    def read(self, text: str) -> tuple[list[int], Any, Any]:
        """Return the ids of a text, its hidden states (T, D), and the cache."""
        import torch

        ids = list(self.tokenizer.encode(text))
        with torch.no_grad():
            hidden, cache = self.model.hidden(torch.tensor([ids]))
        return ids, hidden[0], cache

    def title(self) -> Iterator[str]:
        """Show name and sizes of the model."""
        head = self.model.head
        yield ""
        yield (
            "  "
            + click.style(self.model.name, fg="cyan", bold=True)
            + self.say(
                f"     {head.vocab_size:,} tokens, hidden size {head.hidden_size}",
                f"     词表大小 {head.vocab_size:,}，隐藏维度 {head.hidden_size}",
            )
        )

    def next_token(self) -> Iterator[str]:
        """Show the most probable tokens, from one sweep over the vocabulary."""
        import torch

        yield from self.section(1, f'What comes after "{PROMPT}"?', f"“{PROMPT}”之后是什么？")
        _, hidden, _ = self.read(PROMPT)
        with torch.no_grad():
            logits = self.model.head(hidden[-1])
            answers = logits.ask(top_k=8, logsumexp=True, entropy=True)
        values, ids = answers.top_k
        shares = (values - answers.logsumexp).exp().tolist()
        for id, p in zip(ids.tolist(), shares, strict=True):
            shown = left(visible_bytes(self.tokenizer.token_bytes(id)) or f"<{id}>", 14)
            drawn = bar(p, _BAR)
            yield f"{MARGIN}{shown}{p:7.4f}" + ("  " + cyan(drawn)) * bool(drawn)
        rest, entropy = 1 - sum(shares), float(answers.entropy) / math.log(2)
        yield ""
        yield from self.note(
            f"All other tokens together: {rest:.4f}. Entropy: {entropy:.2f} bits.",
            f"其余所有词元合计 {rest:.4f}。熵：{entropy:.2f} bit。",
        )

    def surprisal(self) -> Iterator[str]:
        """Show the surprisal of each token."""
        import torch

        yield from self.section(2, "How surprised is it by a sentence?", "读一句话时，它有多意外？")
        ids, hidden, _ = self.read(SENTENCE)
        with torch.no_grad():
            logits = self.model.head(hidden[:-1])
            answers = logits.ask(log_prob=torch.tensor(ids[1:]), rank=torch.tensor(ids[1:]))
        bits = (-answers.log_prob / math.log(2)).tolist()
        largest = max(bits)
        for id, cost, rank in zip(ids[1:], bits, answers.rank.tolist(), strict=True):
            shown = left(visible_bytes(self.tokenizer.token_bytes(id)) or f"<{id}>", 14)
            label = right(self.say(f"#{rank + 1:,}", f"第 {rank + 1:,}"), 9)
            drawn = bar(cost / largest, _BAR)
            end = "  " + click.style(drawn, fg="yellow") if drawn else ""
            yield f"{MARGIN}{shown}{cost:6.2f} bit{label}{end}"
        perplexity = 2 ** (sum(bits) / len(bits))
        yield ""
        yield from self.note(
            f"Surprisal is -log2 p; #1 is the most probable token. Perplexity: {perplexity:.1f}.",
            f"惊异度 = -log2 p；第 1 名是概率最大的词元。困惑度：{perplexity:.1f}。",
        )

    def certified(self) -> Iterator[str]:
        """Show greedy text from a quantized copy, every token proven, and the bytes read."""
        import torch

        yield from self.section(
            3, f"{TOKENS} tokens from certified decode", f"有保证的解码：生成 {TOKENS} 个词元"
        )
        head = self.model.head
        ids, hidden, cache = self.read(STORY)
        screened = head.screen(calibration=hidden)
        read, scored, tokens, same = 0, 0, [], True
        with torch.no_grad():
            for _ in range(TOKENS):
                answer = screened.argmax(hidden[-1])
                read += answer.certificate.bytes_read
                scored += int(answer.certificate.rows_rescored)
                tokens.append(int(answer.token))
                exact = head(hidden[-1]).ask(argmax=True).argmax
                same = same and int(exact) == tokens[-1]
                states, cache = self.model.hidden(torch.tensor([tokens[-1:]]), cache)
                hidden = states[0]
        head.screened = None
        text = self.tokenizer.decode([*ids, *tokens])
        for part in text.split("\n"):
            yield from (MARGIN + line for line in textwrap.wrap(part, 70))
        full = TOKENS * head.weight.nbytes
        verdict = (
            ("the same tokens", "词元逐个相同") if same else ("NOT the same tokens", "并不相同")
        )
        yield ""
        yield from self.note(
            f"Read from the head: {_mib(read)} instead of {_mib(full)}, {read / full:.0%}, and on\n"
            f"average {scored / TOKENS:.1f} rows scored exactly. Checked against a full sweep:\n"
            f"{verdict[0]}.",
            f"从输出层读取 {_mib(read)}，而不是 {_mib(full)}（{read / full:.0%}），平均每步只精确\n"
            f"计算 {scored / TOKENS:.1f} 个词元。与完整扫描比对：{verdict[1]}。",
        )

    def memory(self) -> Iterator[str]:
        """Show the peak memory of one training step of the head, dense and ours."""
        yield from self.section(4, "The memory of a training step", "训练一步所需的内存")
        rows, measured = self._step_memory()
        largest = max(rows.values())
        names = {
            "dense": self.say("F.linear + F.cross_entropy", "F.linear + F.cross_entropy"),
            "lmhead": self.say("lmhead", "lmhead"),
        }
        for kind, size in rows.items():
            drawn = cyan(bar(size / largest, _BAR - 8))
            yield f"{MARGIN}{left(names[kind], 28)}{right(_mib(size), 10)}  {drawn}"
        how = (
            ("measured: the peak of this process", "实测：本进程的峰值增长")
            if measured
            else ("computed: this system does not report the peak", "计算值：本系统不提供峰值")
        )
        yield ""
        yield from self.note(
            f"Loss and gradients of {STEP} tokens, without the gradients themselves\n({how[0]}).\n"
            "The dense one grows with the number of tokens.",
            f"{STEP} 个词元的损失和梯度所需，不含梯度本身\n"
            f"（{how[1]}）。词元越多，稠密做法占用越大。",
        )

    def _step_memory(self) -> tuple[dict[str, int], bool]:
        import torch
        import torch.nn.functional as F

        from lmhead.head import LMHead
        from lmhead.sweep.questions import DEFAULT_MAX_BYTES

        head = self.model.head
        _, hidden, _ = self.read(SENTENCE)
        states = hidden[torch.arange(STEP) % len(hidden)].clone().requires_grad_()
        targets = torch.arange(STEP) * 7 % head.vocab_size
        weight = torch.nn.Parameter(head.weight.detach())
        ours = LMHead(head.hidden_size, head.vocab_size, device="meta")
        ours.weight = weight

        def step(kind: str) -> dict[str, Any]:
            logits: Any = F.linear(states, weight) if kind == "dense" else ours(states)
            loss = F.cross_entropy(logits, targets)
            grads = torch.autograd.grad(loss, (states, weight))
            return {"loss": loss.detach(), "hidden": grads[0], "weight": grads[1]}

        sizes: dict[str, int] = {}
        for kind in ("dense", "lmhead"):
            growth = peak_growth(partial(step, kind))
            if growth is None or growth.temporary is None:
                dense = 3 * STEP * head.vocab_size * weight.dtype.itemsize
                return {"dense": dense, "lmhead": min(dense, DEFAULT_MAX_BYTES)}, False
            sizes[kind] = growth.temporary
        return sizes, True

    def farewell(self) -> Iterator[str]:
        """Show commands to try next."""
        name, lmhead = shlex.quote(self.model.name), program()
        yield ""
        yield from self.note("Try next:", "接下来可以试试：")
        for line in (
            f"{lmhead} next {name} 'I love' --temperature 0.7 --top-p 0.9",
            f"{lmhead} generate {name} 'Once upon a time'",
            f"{lmhead} inspect {name}",
            self.say(f"{lmhead} demo --toy", f"{lmhead} demo --toy --lang zh"),
            self.say(f"{lmhead} explore {name}", f"{lmhead} explore {name} --lang zh"),
        ):
            yield MARGIN + "  " + click.style(line, fg="green")
        yield ""


def program() -> str:
    """Return the command that starts this lmhead in the current shell: `lmhead` if on the PATH."""
    python = Path(sys.executable)
    script = python.with_name("lmhead" + python.suffix)
    on_path = shutil.which("lmhead")
    if on_path and Path(on_path).absolute() == script.absolute():
        return "lmhead"
    command: list[Any] = [script] if script.exists() else [python, "-m", "lmhead"]
    first = Path(command[0])
    if first.is_relative_to(Path.cwd()):
        first = first.relative_to(Path.cwd())
    return shlex.join([str(first), *map(str, command[1:])])


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"
