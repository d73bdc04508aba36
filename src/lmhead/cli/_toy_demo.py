"""`lmhead demo --toy`: "I love ___", from a hidden state to a word, and one training step.

A toy model of 6 words finishes the sentence: linear layer, logits, softmax, temperature, choice,
loss, gradient, one training step. Every number is computed by `lmhead.reference`, without torch.
"""

from collections.abc import Iterator
from functools import partial

import click
import numpy as np

from lmhead import reference as ref
from lmhead.cli._terminal import Narration, bar, center, cyan, left, signed_bar, table

# 6 words and 3 numbers, chosen so that the sums can be followed by hand.
HIDDEN = np.array([2.0, 1.0, -1.0])
WEIGHT = np.array(
    [
        [1.5, 0.2, 0.1],
        [0.5, 1.4, -0.1],
        [0.6, 1.0, 0.2],
        [0.3, 0.1, -0.5],
        [0.1, -0.4, -0.2],
        [-0.6, -0.3, 0.5],
    ]
)
WORDS = {
    "en": ["you", "cats", "dogs", "music", "rain", "taxes"],
    "zh": ["你", "猫", "狗", "音乐", "雨天", "交税"],
}
TARGET = 1  # cats
SEED = 42
LEARNING_RATE = 0.1
TEMPERATURES = (0.5, 1.0, 2.0)

_WORD = 8  # columns of the first column of every table
_BAR = 30
_green = partial(click.style, fg="green")
MARGIN = Narration.margin


class ToyDemo(Narration):
    """The lines of the demo, one method per section, in one language."""

    def __init__(self, lang: str) -> None:
        super().__init__(chinese=lang == "zh")
        self.words = WORDS[lang]
        self.logits = ref.head_logits(HIDDEN, WEIGHT)
        self.p = ref.softmax(self.logits)
        self.loss = float(ref.cross_entropy(self.logits, TARGET))

    def lines(self) -> Iterator[str]:
        for section in (
            self.title, self.hidden_state, self.linear_layer, self.softmax, self.temperature,
            self.choice, self.cross_entropy, self.gradient, self.step, self.farewell,
        ):  # fmt: skip
            yield from section()

    # Helpers

    def table(self, heads: list[str], rows: list[list[str]], widths: list[int]) -> Iterator[str]:
        heading, *body = table([heads, *rows], [-_WORD, *widths])
        yield click.style(MARGIN + heading, dim=True)
        for line in body:
            yield MARGIN + line

    def highlight(self, word: int) -> str:
        return click.style(self.words[word], fg="green", bold=True)

    # Sections

    def title(self) -> Iterator[str]:
        sentence = self.say("I love ___", "我爱___")
        yield ""
        yield (
            "  "
            + click.style(sentence, fg="cyan", bold=True)
            + self.say("     how a hidden state becomes a word", "     一个隐藏状态怎样变成一个词")
        )

    def hidden_state(self) -> Iterator[str]:
        yield from self.section(
            1,
            'Hidden state: all the model knows after reading "I love"',
            "隐藏状态：读完“我爱”之后，模型知道的一切",
        )
        vector = "  ".join(f"{x:4.1f}" for x in HIDDEN)
        yield f"{MARGIN}h = [ {vector} ]     " + self.say(
            "(3 numbers here; 576 in SmolLM2-135M)", "（这里 3 个数；SmolLM2-135M 有 576 个）"
        )

    def linear_layer(self) -> Iterator[str]:
        yield from self.section(
            2,
            "Linear layer: a row of weights per word, and a dot product with h",
            "线性层：每个词有一行权重，和 h 做点积",
        )
        rows = []
        for word, row, logit in zip(self.words, WEIGHT, self.logits, strict=True):
            weights = "[" + " ".join(f"{w:4.1f}" for w in row) + " ]"
            rows.append([word, weights, _dot(HIDDEN, row), f"= {logit:5.2f}"])
        heads = ["", self.say("row of W", "W 的一行"), self.say("h · row", "点积"), "logit"]
        yield from self.table(heads, rows, [-20, -35, 9])
        yield ""
        yield from self.note(
            "A logit is a score: any sign, any size. It is no probability yet.",
            "logit 是分数：可正可负，可大可小，还不是概率。",
        )

    def softmax(self) -> Iterator[str]:
        yield from self.section(3, "Softmax: from scores to probabilities", "Softmax：从分数到概率")
        with np.errstate(all="ignore"):
            naive = ref.softmax_naive([1000, 1001, 1002])
        stable = ref.softmax([1000, 1001, 1002])
        assert np.isnan(naive).all()
        figures = ", ".join(f"{x:.3f}" for x in stable)
        yield from self.note(
            "p = exp(z) / sum of all exp(z). But exp(1000) overflows: typed in like\n"
            "this, the logits 1000, 1001, 1002 give nan, nan, nan. So subtract the\n"
            "maximum first. It cancels in the fraction, no exponent is above 0 any\n"
            f"more, and the same logits give {figures}.",
            "p = exp(z) / 所有 exp(z) 之和。可是 exp(1000) 会溢出：照公式直接算，\n"
            "logit 为 1000、1001、1002 时只会得到 nan, nan, nan。\n"
            "所以先减去最大值：它在分子分母中约掉，结果不变，而指数不再大于 0，\n"
            f"同样的三个 logit 就得到 {figures}。",
        )
        yield ""
        shifted = self.logits - self.logits.max()
        e = np.exp(shifted)
        rows = [
            [w, f"{z:.2f}", f"{s:.2f}", f"{x:.3f}", f"{p:.3f}", cyan(bar(p, _BAR))]
            for w, z, s, x, p in zip(self.words, self.logits, shifted, e, self.p, strict=True)
        ]
        total = [self.say("sum", "合计"), "", "", f"{e.sum():.3f}", f"{self.p.sum():.3f}", ""]
        heads = ["", "z", "z - max", "exp", "p", ""]
        yield from self.table(heads, [*rows, total], [8, 10, 8, 8, 0])

    def temperature(self) -> Iterator[str]:
        yield from self.section(
            4, "Temperature: divide the logits by T first", "温度：先把 logit 除以 T"
        )
        warmed = [ref.softmax(self.logits, temperature=t) for t in TEMPERATURES]
        rows = [
            [word, *(f"{p[i]:6.3f} " + left(cyan(bar(p[i], 12)), 14) for p in warmed)]
            for i, word in enumerate(self.words)
        ]
        nats = [float(ref.entropy(self.logits / t)) for t in TEMPERATURES]
        rows.append([self.say("entropy", "熵"), *(left(f"{h:6.3f}", 21) for h in nats)])
        heads = ["", *(left(f" T = {t:g}", 21) for t in TEMPERATURES)]
        yield from self.table(heads, rows, [22, 22, 22])
        yield ""
        yield from self.note(
            "Cold is sure of itself, warm is open to surprise. The order never changes.\n"
            f"(Entropy in nats: 0 is certain, log {len(self.words)} = "
            f"{np.log(len(self.words)):.3f} is no idea at all.)",
            "温度低，更笃定；温度高，更愿意冒险。词的先后次序始终不变。\n"
            f"（熵以 nat 计：0 表示完全确定，log {len(self.words)} = "
            f"{np.log(len(self.words)):.3f} 表示毫无头绪。）",
        )

    def choice(self) -> Iterator[str]:
        yield from self.section(5, "Choosing the word", "选词")
        best = int(ref.greedy(self.logits))
        assert best == int(ref.argmax(self.p))
        u = float(np.random.default_rng(SEED).random())
        drawn = int(ref.sample_inverse_cdf(self.p, u))
        yield MARGIN + self.say("Greedy:  I love ", "贪心：我爱") + self.highlight(best)
        yield from self.note(
            "         The largest logit is the largest p, so argmax needs no softmax.",
            "      logit 最大的词就是概率最大的词，所以取 argmax 不必算 softmax。",
        )
        yield ""
        yield MARGIN + self.say("Sampled: I love ", "采样：我爱") + self.highlight(drawn)
        yield from self.note(
            f"         Lay the p end to end and throw a dart: u = {u:.3f} (seed {SEED}).",
            f"      把概率首尾相接排成一条线，掷一支飞镖：u = {u:.3f}（种子 {SEED}）。",
        )
        yield ""
        width = 66
        ends = [0, *(round(x * width) for x in np.cumsum(self.p))]
        line = "".join(
            center(word, end - start - 1) + "│" if end > start else ""
            for word, start, end in zip(self.words, ends, ends[1:], strict=False)
        )
        yield f"{MARGIN}0 │{line} 1"
        yield MARGIN + "   " + " " * int(u * width) + _green("▲")

    def cross_entropy(self) -> Iterator[str]:
        yield from self.section(
            6, "Cross-entropy: how surprised by the truth", "交叉熵：看到真相时有多意外"
        )
        p, word = float(self.p[TARGET]), self.words[TARGET]
        perplexity = float(np.exp(self.loss))
        yield from self.note(
            f'Say the text went on with "{word}". The model gave it p = {p:.4f}, so\n',
            f"假设原文的下一个词是“{word}”，模型给它的概率是 p = {p:.4f}，于是\n",
        )
        yield f"{MARGIN}loss = -log p = -log {p:.4f} = " + click.style(
            f"{self.loss:.3f}", fg="yellow", bold=True
        )
        yield ""
        yield from self.note(
            f"p = 1 would cost nothing. exp(loss) = {perplexity:.2f} is the perplexity:\n"
            f"as unsure as a choice among {perplexity:.2f} equal words.",
            f"p = 1 时损失为 0。exp(loss) = {perplexity:.2f} 叫困惑度：\n"
            f"相当于在 {perplexity:.2f} 个同样可能的词里犹豫。",
        )

    def gradient(self) -> Iterator[str]:
        yield from self.section(
            7, "Gradient of the loss: p - y, belief minus truth", "损失的梯度：p - y，信念减去真相"
        )
        y = ref.one_hot(TARGET, len(self.words))
        grad = ref.cross_entropy_backward(self.logits, TARGET)
        rows = []
        for i, word in enumerate(self.words):
            drawn = signed_bar(grad[i], 22)
            color = "green" if grad[i] < 0 else "red"
            rows.append(
                [
                    word,
                    f"{self.p[i]:.3f}",
                    f"{y[i]:.0f}",
                    f"{grad[i]:+.3f}",
                    click.style(drawn, fg=color),
                ]
            )
        total = [
            self.say("sum", "合计"),
            f"{self.p.sum():.3f}",
            f"{y.sum():.0f}",
            f"{abs(grad.sum()):.3f}",
            "",
        ]
        yield from self.table(["", "p", "y", "p - y", ""], [*rows, total], [8, 5, 10, 0])
        yield ""
        back = ref.linear_cross_entropy_backward(HIDDEN, WEIGHT, TARGET).x
        vector = "  ".join(f"{x:.3f}" for x in back)
        yield from self.note(
            "Learning goes against it: the right word is pushed up, every other word\n"
            "down by as much as it was believed. The layers below learn from the same\n"
            f"p - y, sent back through W:  (p - y) W = [ {vector} ]",
            "学习就是朝梯度的反方向走：正确的词被推高，其余的词被压低，\n"
            "原先信得越多，压得越狠。下面各层学到的也是同一个 p - y，\n"
            f"只不过先穿过 W：(p - y) W = [ {vector} ]",
        )

    def step(self) -> Iterator[str]:
        yield from self.section(
            8,
            f"One step downhill: each word's row of W moves by -{LEARNING_RATE} (p - y) h",
            f"下山一步：每个词在 W 里的那一行移动 -{LEARNING_RATE} (p - y) h",
        )
        grads = ref.linear_cross_entropy_backward(HIDDEN, WEIGHT, TARGET)
        learned = WEIGHT - LEARNING_RATE * grads.weight
        logits = ref.head_logits(HIDDEN, learned)
        after, loss = ref.softmax(logits), float(ref.cross_entropy(logits, TARGET))
        rows = [
            [w, f"{a:.3f}", f"{b:.3f}", (_green if i == TARGET else cyan)(bar(b, _BAR))]
            for i, (w, a, b) in enumerate(zip(self.words, self.p, after, strict=True))
        ]
        rows.append(["loss", f"{self.loss:.3f}", f"{loss:.3f}", ""])
        heads = ["", self.say("p before", "更新前 p"), self.say("p after", "更新后 p"), ""]
        yield from self.table(heads, rows, [10, 10, 0])
        yield ""
        best = int(ref.greedy(logits))
        yield (
            MARGIN
            + self.say(
                f"The loss fell from {self.loss:.3f} to {loss:.3f}. The model now says: I love ",
                f"损失从 {self.loss:.3f} 降到 {loss:.3f}，模型现在会说：我爱",
            )
            + self.highlight(best)
        )

    def farewell(self) -> Iterator[str]:
        yield ""
        yield from self.note(
            "Training is this, some billion times. To read on: docs/textbook.md\n"
            "中文版：lmhead demo --toy --lang zh",
            "所谓训练，就是把这一步重复亿万次。接着读：docs/textbook.zh.md\n"
            "In English: lmhead demo --toy",
        )
        yield ""


def _dot(h: ref.Array, row: ref.Array) -> str:
    """Return the sum written out: "2.0×1.5 + 1.0×0.2 - 1.0×(-0.1)"."""
    terms = [
        ("+ " if x >= 0 else "- ")
        + left(f"{abs(x):.1f}×" + (f"{w:.1f}" if w >= 0 else f"({w:.1f})"), 11)
        for x, w in zip(h, row, strict=True)
    ]
    return "".join(terms).removeprefix("+ ")
