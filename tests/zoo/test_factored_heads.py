"""Every snippet on the logits of factored heads: lazy against the same logits in memory."""

import warnings

import pytest
import torch

import zoo.snippets  # noqa: F401
from lmhead import AdaptiveHead, HierarchicalHead, PerformanceWarning
from lmhead.vocab.factored_head import FactoredHead
from zoo.agreement import agree
from zoo.catalogue import SNIPPETS, Run, Sizes, Snippet, gradients, make_batch, materialized


def _head(kind: str, hidden_size: int) -> FactoredHead:
    torch.manual_seed(9)
    if kind == "adaptive":
        return AdaptiveHead(hidden_size, Sizes().V, cutoffs=[10, 20]).double()
    return HierarchicalHead(hidden_size, Sizes().V, tree="balanced").double()


def _run(entry: Snippet, kind: str, *, lazy: bool) -> Run:
    sizes = Sizes()
    x = make_batch(sizes, torch.float64)
    heads = {"hidden": _head(kind, sizes.D), "other_hidden": _head(kind, sizes.D + 2)}
    for name in ("weight", "bias", "other_weight"):
        del x.leaves[name]
    for name, head in heads.items():
        x.leaves |= {f"{name} {n}": p for n, p in head.named_parameters()}

    def logits(name: str) -> object:
        z = heads[name](x.leaves[name])
        return z if lazy else materialized(z).clone()

    with torch.set_grad_enabled(entry.grad):
        z = logits("hidden")
        if entry.two:
            x.other = logits("other_hidden")
        torch.manual_seed(5)
        results = entry.function(z, x)
        results = results if isinstance(results, tuple) else (results,)
        results = tuple(materialized(r) for r in results)
    return Run(results, gradients(results, x.leaves))


@pytest.mark.parametrize("kind", ["adaptive", "hierarchical"])
@pytest.mark.parametrize("name", sorted(SNIPPETS))
def test_values_and_gradients(name: str, kind: str) -> None:
    entry = SNIPPETS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error" if entry.builds is None else "ignore", PerformanceWarning)
        lazy = _run(entry, kind, lazy=True)
    dense = _run(entry, kind, lazy=False)
    agree(lazy, dense, dense, torch.float64)


@pytest.mark.parametrize("kind", ["adaptive", "hierarchical"])
def test_the_tensor_has_the_strides_of_the_logits(kind: str) -> None:
    logits = _head(kind, 5)(torch.randn(2, 3, 5, dtype=torch.float64))
    assert materialized(logits).stride() == logits.stride()
    assert logits.detach().view(-1).shape == (logits.numel(),)
