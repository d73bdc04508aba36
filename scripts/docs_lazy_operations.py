"""The page "What streams": torch's functions by what lazy logits do with them, read from the code.

    python scripts/docs_lazy_operations.py [zh]     print the page

A function is listed under its own name; methods and operators of the same name behave alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lmhead.lazy import indexing, reductions, row_functions, torch_function, torch_losses, views
from lmhead.lazy.recording import OPERATOR_SYMBOLS, POINTWISE

TEXT = {
    "en": {
        "title": "# What streams",
        "intro": "What lazy logits do with torch's functions; read from the tables in the code "
        "when this page is built. [Lazy logits](lazy.md) explains the rules.",
        "pointwise": "Recorded: entry by entry",
        "rows": "Recorded: rows, shapes, dtypes",
        "written": "Recorded: in-place changes and scatter",
        "reductions": "Computed a few rows at a time",
        "losses": "Losses",
        "other": "Answered without logits",
        "builds": "Builds the tensor",
        "pointwise text": "With numbers, with tensors that broadcast to (..., V), and with other "
        "lazy logits. Also in place (`add_`, `masked_fill_`, ...).",
        "rows text": "Nothing is computed; softmax and log-softmax over the vocabulary are "
        "recorded too.",
        "written text": "They change the object, and its views, as they change a tensor.",
        "reductions text": "Over the vocabulary, over everything or over tuples of dimensions, "
        "forward and backward, within `max_bytes`.",
        "losses text": "With reduction `none`, pointwise losses are recorded; with `mean` and "
        "`sum` they are computed a few rows at a time.",
        "other text": "New tensors of this shape or type, and attributes.",
        "builds text": "Everything else, with a `PerformanceWarning` that names the operation and "
        "the caller's line, if the tensor is larger than 8 MiB or needs a gradient. Among these:",
    },
    "zh": {
        "title": "# 哪些操作是流式的",
        "intro": "惰性 logits 对 torch 各函数的处理；生成本页时从代码的表中读取。"
        "规则见[惰性 logits](lazy.md)。",
        "pointwise": "记录：逐元素",
        "rows": "记录：行、形状、类型",
        "written": "记录：原地修改与 scatter",
        "reductions": "每次计算若干行",
        "losses": "损失",
        "other": "不涉及 logits",
        "builds": "生成张量",
        "pointwise text": "可与数、能广播到 (..., V) 的张量以及其他惰性 logits 一起使用。"
        "也可以原地进行（`add_`、`masked_fill_` 等）。",
        "rows text": "不作任何计算；对词表的 softmax 和 log-softmax 也只是记录。",
        "written text": "像修改张量一样修改对象及其视图。",
        "reductions text": "对词表、对全部元素或对若干维度，前向和反向都在 `max_bytes` 之内。",
        "losses text": "reduction 为 `none` 时，逐元素的损失只是记录；"
        "为 `mean` 或 `sum` 时每次计算若干行。",
        "other text": "同形状或同类型的新张量，以及属性。",
        "builds text": "其余的一切；若张量超过 8 MiB 或需要梯度，会给出 `PerformanceWarning`，"
        "写明操作和调用者所在的行。例如：",
    },
}
# Functions that people use on logits and that need the whole tensor.
_WHOLE = ("sort", "argsort", "cumsum", "cumprod", "matmul", "unique", "histc")

# Names in lazy/handlers.py of what handles reductions, and shapes and dtypes.
_REDUCE = ("reduction", "std", "argmax", "norm", "vector_norm", "linalg_norm", "gather", "equal",
           "allclose")  # fmt: skip
_CHANGE_FORM = ("cast_to", "type_", "type_as", "view_as", "reshape_as", "broadcast_tensors",
                "unchanged", "<lambda>")  # fmt: skip


def _name(function: Any) -> str:
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__"):
        name = function.__self__.__name__
    for space in ("special", "linalg"):
        name = name.replace(f"{space}_", f"{space}.")
    return OPERATOR_SYMBOLS.get(name, name)


def _group(function: Any, handler: Callable[..., Any]) -> str:
    """Return the section of a function that has a handler of its own."""
    inner: Any = handler.func if isinstance(handler, partial) else handler
    module, qualified = inner.__module__, inner.__qualname__
    name = getattr(function, "__name__", "")
    if module == torch_losses.__name__:
        return "losses"
    if name in ("where", "__eq__", "__ne__", "mask_tokens"):
        return "pointwise"
    if module == row_functions.__name__:
        recorded = ("tile", "vstack", "row_stack", "hstack", "normalize", "dropout")
        return "rows" if name in recorded else "reductions"
    made_by = qualified.split(".")[0]
    if module == reductions.__name__ or made_by in _REDUCE:
        return "reductions"
    if made_by == "refused":
        return "refused"
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    if in_place or "scatter" in name or name == "__setitem__" or made_by == "set_data":
        return "written"
    if module in (views.__name__, indexing.__name__) or "softm" in name or "index" in name:
        return "rows"
    if made_by in _CHANGE_FORM:
        return "rows"
    return "other"


def groups() -> dict[str, list[str]]:
    """Return the names of each section, sorted."""
    sections: dict[str, set[str]] = {"pointwise": {_name(function) for function in POINTWISE}}
    for function, handler in torch_function.HANDLERS.items():
        sections.setdefault(_group(function, handler), set()).add(_name(function))
    known = set().union(*sections.values())
    sections["builds"] = {name for name in _WHOLE if name not in known}
    return {
        group: sorted(n for n in names if n and not n.startswith(("_", "torch.")))
        for group, names in sections.items()
    }


def page(language: str) -> str:
    """Return the page."""
    text, named = TEXT[language], groups()

    def lines() -> Iterator[str]:
        yield from (text["title"], "", text["intro"], "")
        order = ("pointwise", "rows", "reductions", "losses", "written", "other", "builds")
        for group in order:
            yield from (f"## {text[group]}", "", text[f"{group} text"], "")
            yield from (", ".join(f"`{name}`" for name in named[group]), "")

    return "\n".join(lines())


if __name__ == "__main__":
    print(page("zh" if "zh" in sys.argv[1:] else "en"))
