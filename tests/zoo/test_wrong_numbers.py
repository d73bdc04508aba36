"""W1 to W5: the silent wrong numbers that were found inside real clients, on dense and lazy logits.

Each test says what went wrong before. `make` gives logits: `F.linear` for "dense", `LMHead` for
"lazy". The dense runs check the tests themselves.
"""

from __future__ import annotations

import json
import re
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from preloaded_python import preloaded_python
from session_folder import session_folder
from torch import Tensor, nn

from lmhead import LMHead
from zoo.catalogue import materialized

B, T, V, D = 2, 5, 29, 6
EXACT = 1e-11
NEG = float("-inf")


@pytest.fixture(params=["dense", "lazy"])
def kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))


def head_of(kind: str, seed: int = 0) -> Any:
    """`nn.Linear` or an `LMHead` with its numbers; float64."""
    torch.manual_seed(seed)
    linear = nn.Linear(D, V, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.mul_(3)
    if kind == "dense":
        return linear
    head = LMHead(D, V, bias=True, dtype=torch.float64)
    head.load_state_dict(linear.state_dict())
    return head


def hidden_of(seed: int = 7, requires_grad: bool = True) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(B, T, D, dtype=torch.float64).requires_grad_(requires_grad)


def log_probs(z: Any, ids: Tensor) -> Any:
    return torch.log_softmax(z, -1).gather(-1, ids[..., None]).squeeze(-1)


def backward(loss: Any) -> None:
    loss.backward()


# --- W1: in-place methods -------------------------------------------------------------------------

WRITES: dict[str, Callable[[Any, Tensor], Any]] = {
    "div_": lambda z, _: z.div_(0.6),
    "mul_": lambda z, _: z.mul_(1.7),
    "add_": lambda z, _: z.add_(torch.linspace(-2, 2, V, dtype=z.dtype)),
    "sub_": lambda z, _: z.sub_(torch.linspace(-2, 2, V, dtype=z.dtype)),
    "masked_fill_": lambda z, _: z.masked_fill_(torch.arange(V) % 3 == 1, NEG),
    "scatter_": lambda z, ids: z.scatter_(-1, ids[..., None], 4.0),
    "scatter_add_": lambda z, ids: z.scatter_add_(-1, ids[..., None], torch.ones_like(z[..., :1])),
    "clamp_": lambda z, _: z.clamp_(-0.5, 0.5),
    "zero_": lambda z, _: z.zero_(),
    "fill_": lambda z, _: z.fill_(2.0),
    "index_fill_": lambda z, _: z.index_fill_(-1, torch.tensor([0, 5]), 3.0),
    "copy_": lambda z, _: z.copy_(torch.linspace(-2, 2, V, dtype=z.dtype).expand(B, T, V)),
    "relu": lambda z, _: F.relu(z, inplace=True),
    "exp_": lambda z, _: z.exp_(),
    "tanh_": lambda z, _: z.tanh_(),
    "abs_": lambda z, _: z.abs_(),
    "neg_": lambda z, _: z.neg_(),
    "pow_": lambda z, _: z.pow_(2),
    "index_add_": lambda z, _: z.index_add_(
        -1, torch.tensor([3, 4]), torch.ones(B, T, 2, dtype=z.dtype)
    ),
    "index_copy_": lambda z, _: z.index_copy_(
        -1, torch.tensor([3, 4]), torch.ones(B, T, 2, dtype=z.dtype)
    ),
    "put_": lambda z, _: z.put_(torch.tensor([3, 40]), torch.tensor([9.0, 9.0], dtype=z.dtype)),
    "masked_scatter_": lambda z, _: z.masked_scatter_(
        torch.arange(V) < 2, torch.arange(2.0 * B * T, dtype=z.dtype)
    ),
    "lerp_": lambda z, _: z.lerp_(torch.ones(V, dtype=z.dtype), 0.5),
    "addcmul_": lambda z, _: z.addcmul_(torch.ones(V, dtype=z.dtype), torch.arange(V).to(z.dtype)),
    "nan_to_num_": lambda z, _: z.mul_(torch.inf).nan_to_num_(posinf=2.0, neginf=-2.0),
}


@pytest.mark.parametrize("write", WRITES)
def test_w1_later_questions_see_a_write(kind: str, ids: Tensor, write: str) -> None:
    """Before: the write changed a cached copy, and log-probs, loss and argmax ignored it."""
    with torch.no_grad():
        expected = F.linear(hidden_of(), *head_of("dense").parameters())
        unchanged = expected.clone()
        WRITES[write](expected, ids)
        z = head_of(kind)(hidden_of())
        returned = WRITES[write](z, ids)
    for target in (z, returned):
        assert_close(log_probs(target, ids), log_probs(expected, ids), rtol=EXACT, atol=EXACT)
        assert_close(
            F.cross_entropy(target.view(-1, V), ids.view(-1)),
            F.cross_entropy(expected.view(-1, V), ids.view(-1)),
            rtol=EXACT,
            atol=EXACT,
        )
        assert_close(target.logsumexp(-1), expected.logsumexp(-1), rtol=EXACT, atol=EXACT)
        assert torch.equal(target.argmax(-1), expected.argmax(-1)) or write in ("zero_", "fill_")
        assert_close(materialized(target), expected, rtol=EXACT, atol=EXACT)
    assert not torch.equal(unchanged, expected), "the write must change something"


@pytest.mark.parametrize(
    "write", ["div_", "mul_", "add_", "sub_", "masked_fill_", "clamp_", "tanh_"]
)
def test_w1_gradients_see_a_write(kind: str, ids: Tensor, write: str) -> None:
    """Before: the gradient norm of TRL 1.1's GRPO at T = 0.6 was 1.47 in place of 2.44."""
    gradients = []
    for which in ("dense", kind):
        head, hidden = head_of(which), hidden_of()
        z = head(hidden)
        WRITES[write](z, ids)
        kept = (ids % 3 != 1).to(z.dtype)  # masked_fill_ forbids the others
        backward((log_probs(z, ids).clamp(min=-50) * kept).sum())
        gradients.append((hidden.grad, head.weight.grad, head.bias.grad))
    for ours, theirs in zip(gradients[1], gradients[0], strict=True):
        assert_close(ours, theirs, rtol=EXACT, atol=EXACT)


def test_w1_kl_to_the_identical_reference_is_zero(kind: str, ids: Tensor) -> None:
    """Before: TRL 1.1 reported a KL of 0.0071, since only one side was divided by T."""
    policy = head_of(kind)(hidden_of())
    policy.div_(0.6)
    reference = head_of(kind)(hidden_of()).detach() / 0.6
    difference = log_probs(reference, ids) - log_probs(policy, ids)
    kl = torch.exp(difference) - difference - 1
    assert_close(kl, torch.zeros(B, T, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("operator", ["/=", "*=", "+=", "-="])
def test_w1_augmented_assignment(kind: str, ids: Tensor, operator: str) -> None:
    """Before: `z /= T` rebound the local name; the caller's object kept its old numbers."""

    def temperature(z: Any) -> None:
        exec(f"z {operator} 2.0", {"z": z})

    z = head_of(kind)(hidden_of())
    expected = head_of("dense")(hidden_of())
    temperature(z)
    temperature(expected)
    assert_close(z.logsumexp(-1), expected.logsumexp(-1), rtol=EXACT)
    assert_close(log_probs(z, ids), log_probs(expected, ids), rtol=EXACT, atol=EXACT)


def test_w1_a_forbidden_token_does_not_win(kind: str) -> None:
    """Before: the mask of a grammar engine was lost and the forbidden token was chosen."""
    with torch.no_grad():
        z = head_of(kind)(hidden_of())[:, -1]
        best = head_of("dense")(hidden_of())[:, -1].argmax(-1)
        allowed = torch.ones(B, V, dtype=torch.bool).scatter_(-1, best[:, None], False)
        z.masked_fill_(~allowed, NEG)
    assert (z.argmax(-1) != best).all()
    assert (z.softmax(-1).gather(-1, best[:, None]) == 0).all()
    assert (z.topk(3).indices != best[:, None]).all()


@pytest.mark.filterwarnings("ignore::lmhead.PerformanceWarning")
@pytest.mark.parametrize("way", ["data_ptr", "numpy", "data", "dlpack", "as_strided"])
def test_w1_a_write_through_memory_is_seen(kind: str, way: str) -> None:
    """Before: what was written through the data pointer, as xgrammar does, was ignored."""
    with torch.no_grad():
        z = head_of(kind)(hidden_of())[:, -1].float()
        z = z.clone() if kind == "dense" else z
        token = int(z.argmax(-1)[0])
        if way == "data_ptr":
            import ctypes

            assert z.is_contiguous()
            memory = (ctypes.c_float * z.numel()).from_address(z.data_ptr())
            memory[token] = NEG
        elif way == "numpy":
            z.numpy()[0, token] = NEG
        elif way == "data":
            z.data[0, token] = NEG
        elif way == "dlpack":
            torch.utils.dlpack.from_dlpack(z)[0, token] = NEG
        else:
            z.as_strided((V,), (1,))[token] = NEG
        assert int(z.argmax(-1)[0]) != token
        assert float(z.log_softmax(-1)[0, token]) == NEG
        assert float(z[0, token]) == NEG


@pytest.mark.filterwarnings("ignore::lmhead.PerformanceWarning")
@pytest.mark.parametrize("write", ["base", "view", "chain"])
def test_w1_memory_shared_with_a_view(kind: str, write: str) -> None:
    """A view and its base share memory: the right number, or an error, never the old number."""
    numbers = []
    for which in ("dense", kind):
        with torch.no_grad():
            z = head_of(which)(hidden_of())
            view = z[:, 1:]
            inner = view[0]
            if write == "base":
                z.mul_(2.0)
            elif write == "view":
                view.mul_(2.0)
            else:
                inner.add_(torch.arange(V).to(z.dtype))
            numbers.append([answer_or_error(t) for t in (z, view, inner)])
    for k, (ours, theirs) in enumerate(zip(numbers[1], numbers[0], strict=True)):
        if isinstance(ours, RuntimeError):
            assert kind == "lazy"
            assert len(str(ours)) > 40, "an error says the cause and the cure"
        else:
            assert_close(ours, theirs, rtol=EXACT, what=f"object {k}")


def answer_or_error(z: Any) -> Any:
    try:
        return z.logsumexp(-1)
    except RuntimeError as stale:
        return stale


@pytest.mark.filterwarnings("ignore::lmhead.PerformanceWarning")
def test_w1_out_argument(kind: str) -> None:
    """`out=` writes, or is refused."""
    z, expected = (head_of(k)(hidden_of()).detach() for k in (kind, "dense"))
    try:
        torch.add(z, 1.0, out=z)
        torch.mul(z, torch.arange(V).to(z.dtype), out=z)
    except (TypeError, RuntimeError):
        z = (z + 1.0) * torch.arange(V)
    assert_close(z.logsumexp(-1), ((expected + 1) * torch.arange(V)).logsumexp(-1), rtol=EXACT)


# --- W2: gradient mode ----------------------------------------------------------------------------


def test_w2_logits_made_under_no_grad_are_constants(kind: str, ids: Tensor) -> None:
    """Before: the old log-probs of PPO carried gradients: head gradient 0.0 in place of 1.41."""
    norms = []
    for which in ("dense", kind):
        head, hidden = head_of(which), hidden_of(requires_grad=False)
        with torch.no_grad():
            old = head(hidden)
        assert not old.requires_grad
        assert not log_probs(old, ids).requires_grad
        ratio = torch.exp(log_probs(head(hidden), ids) - log_probs(old, ids))
        backward(ratio.sum())
        norms.append(head.weight.grad.norm())
    assert float(norms[0]) > 0.1
    assert_close(norms[1], norms[0], rtol=EXACT)


def test_w2_a_teacher_under_no_grad_gets_no_gradient(kind: str) -> None:
    """Before: GKD's teacher got a gradient."""
    student, teacher = head_of(kind), head_of(kind, seed=3)
    with torch.no_grad():
        target = teacher(hidden_of(8))
    log_p, log_q = F.log_softmax(student(hidden_of()), -1), F.log_softmax(target, -1)
    backward(F.kl_div(log_p, log_q, reduction="none", log_target=True).sum())
    assert teacher.weight.grad is None
    assert teacher.bias.grad is None
    assert student.weight.grad.norm() > 0.1


def test_w2_a_live_teacher_is_a_constant(kind: str) -> None:
    """Before: TRL's SDFT, whose teacher is the student itself, trained both sides."""
    gradients = []
    for which in ("dense", kind):
        head, hidden = head_of(which), hidden_of()
        with torch.no_grad():
            teacher = head(0.9 * hidden)
        student = head(hidden)
        log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
        backward((log_q.exp() * (log_q - log_p)).sum())
        gradients.append((head.weight.grad, hidden.grad))
    for ours, theirs in zip(gradients[1], gradients[0], strict=True):
        assert_close(ours, theirs, rtol=EXACT, atol=EXACT)


def test_w2_logits_made_under_inference_mode_work_outside(kind: str, ids: Tensor) -> None:
    """Before: they failed outside it."""
    with torch.inference_mode():
        z = head_of(kind)(hidden_of())
    assert not z.requires_grad
    expected = head_of("dense")(hidden_of()).detach()
    assert_close(log_probs(z, ids), log_probs(expected, ids), rtol=EXACT)
    assert not log_probs(z, ids).requires_grad
    assert torch.equal(z.argmax(-1), expected.argmax(-1))


def test_w2_gradient_mode_of_the_question(kind: str, ids: Tensor) -> None:
    """Logits made with gradients, asked under `no_grad`: the answer is a constant, they are not."""
    head, hidden = head_of(kind), hidden_of()
    z = head(hidden)
    with torch.no_grad():
        assert not log_probs(z, ids).requires_grad
        assert not z.div(2.0).requires_grad
        halved = z / 2.0
    assert z.requires_grad
    assert not halved.requires_grad
    assert not halved.logsumexp(-1).requires_grad
    assert log_probs(z, ids).requires_grad


def test_w2_detach_is_for_ever(kind: str) -> None:
    head, hidden = head_of(kind), hidden_of()
    z = head(hidden).detach()
    assert not z.requires_grad
    assert not (z / 2).logsumexp(-1).requires_grad
    assert not z[:, 1:].softmax(-1).sum().requires_grad


def test_w2_later_requires_grad_does_not_reach_back(kind: str) -> None:
    """A weight that was frozen at the call and is thawed afterwards gets no gradient from it."""
    head, hidden = head_of(kind), hidden_of()
    head.requires_grad_(False)
    z = head(hidden)
    head.requires_grad_(True)
    backward(z.logsumexp(-1).sum())
    assert hidden.grad is not None
    assert head.weight.grad is None


@pytest.mark.parametrize("where", ["at the call", "at the question"])
def test_w2_autocast_of_the_call_counts(kind: str, where: str) -> None:
    """The dtype is decided where the head is called, as for a tensor."""
    torch.manual_seed(0)
    linear = nn.Linear(D, V)
    head: Any = linear
    if kind == "lazy":
        head = LMHead(D, V, bias=True)
        head.load_state_dict(linear.state_dict())
    hidden = torch.randn(B, D)
    with torch.autocast("cpu", torch.bfloat16, enabled=where == "at the call"):
        z = head(hidden)
        expected = linear(hidden)
    assert z.dtype == expected.dtype
    with torch.autocast("cpu", torch.bfloat16, enabled=where == "at the question"):
        ours, theirs = z.float().logsumexp(-1), expected.float().logsumexp(-1)
    truth = F.linear(hidden.double(), linear.weight.double(), linear.bias.double()).logsumexp(-1)
    assert ours.dtype == theirs.dtype
    error = (theirs - truth).abs().max()
    assert (ours - truth).abs().max() <= error + 1e-5


# --- W3: late evaluation --------------------------------------------------------------------------


def modified_weight(head: Any, hidden: Tensor) -> None:
    optimizer = torch.optim.SGD(head.parameters(), lr=5.0)
    backward(head(hidden).logsumexp(-1).sum())
    optimizer.step()


def load_state(head: Any, _: Tensor) -> None:
    head.load_state_dict({name: 2 * p for name, p in head.state_dict().items()})


def average(head: Any, _: Tensor) -> None:
    with torch.no_grad():
        for p in head.parameters():
            p.lerp_(p.flip(0), 0.5)


def modified_bias(head: Any, _: Tensor) -> None:
    with torch.no_grad():
        head.bias.add_(torch.arange(V))


def modified_hidden(_: Any, hidden: Tensor) -> None:
    with torch.no_grad():
        hidden.neg_()


def new_data(head: Any, _: Tensor) -> None:
    head.weight.data = -2 * head.weight.data


def step_through_data(head: Any, _: Tensor) -> None:
    """As optimizers, averages and merged adapters do; torch does not count it."""
    head.weight.data.add_(torch.full_like(head.weight.data, 0.1))


def bias_through_data(head: Any, _: Tensor) -> None:
    head.bias.data.mul_(2)


@pytest.mark.parametrize(
    "change",
    [modified_weight, load_state, average, modified_bias, modified_hidden, new_data,
     step_through_data, bias_through_data],
    ids=lambda f: f.__name__,
)  # fmt: skip
@pytest.mark.parametrize("question", ["loss", "log_prob", "argmax", "sum", "materialize"])
def test_w3_answers_do_not_follow_later_changes(
    kind: str, ids: Tensor, change: Callable[[Any, Tensor], None], question: str
) -> None:
    """Before: backward, optimizer step, then the loss of the same logits: 0.40 in place of 9.92.

    The number of the time of the call, or an error that names what was modified.
    """

    def ask(z: Any) -> Any:
        if question == "loss":
            return F.cross_entropy(z.view(-1, V), ids.view(-1))
        if question == "log_prob":
            return log_probs(z, ids)
        if question == "sum":
            return (2 * z).exp().sum(-1)
        return z.argmax(-1) if question == "argmax" else materialized(z)

    expected = ask(head_of("dense")(hidden_of()))
    head, hidden = head_of(kind), hidden_of()
    z = head(hidden)
    change(head, hidden)
    try:
        answer = ask(z)
    except RuntimeError as error:
        answer = error
    if isinstance(answer, RuntimeError):
        assert kind == "lazy"
        assert re.search("weight|bias|hidden", str(answer)), answer
        assert re.search("modified|changed", str(answer)), answer
    else:
        assert_close(answer.detach(), expected.detach(), rtol=EXACT, atol=EXACT)


def test_w3_backward_after_a_change_raises(kind: str, ids: Tensor) -> None:
    """As autograd does: a loss whose weight was modified before `backward` is refused."""
    head, hidden = head_of(kind), hidden_of()
    loss = F.cross_entropy(head(hidden).view(-1, V), ids.view(-1))
    with torch.no_grad():
        head.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified"):
        backward(loss)


# --- W4: DistributedDataParallel ------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, str]]]:
    """What is wrong after training on two ranks, by mode, for each rank."""

    def train(folder: Path) -> None:
        script = Path(__file__).with_name("distributed_steps.py")
        done = subprocess.run(
            [preloaded_python(), str(script), str(folder)],
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]

    folder = session_folder(tmp_path_factory, "w4-ranks", train)
    return lambda kind: [json.loads((folder / f"{kind}{r}.json").read_text()) for r in (0, 1)]


@pytest.mark.parametrize("mode", ["plain", "static_graph", "find_unused_parameters"])
@pytest.mark.parametrize("loss", ["inside", "outside"])
def test_w4_ranks_stay_together(
    kind: str, mode: str, loss: str, trained: Callable[[str], list[dict[str, str]]]
) -> None:
    """Before: with `static_graph=True` and the loss outside, ranks drifted apart silently.

    With `find_unused_parameters=True` it crashed and recommended `static_graph`.
    """
    assert [found[f"{mode} {loss}"] for found in trained(kind)] == ["", ""]


@pytest.mark.parametrize("frozen", [False, True])
def test_w4_full_backward_hooks_run(kind: str, frozen: bool) -> None:
    """Hooks on the module see its gradient, as with `nn.Linear`."""
    head, hidden = head_of(kind), hidden_of()
    head.requires_grad_(not frozen)
    seen: list[Any] = []

    def hook(_module: Any, grad_input: Any, grad_output: Any) -> None:
        seen.append((grad_input[0].shape, grad_output[0].shape))

    head.register_full_backward_hook(hook)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backward(head(hidden).logsumexp(-1).sum())
    assert seen, "the hook did not run"
    assert seen[0][0] == hidden.shape


# --- W5: comparisons and tracing ------------------------------------------------------------------


def test_w5_equality_has_the_shape_of_the_logits(kind: str) -> None:
    """Before: `z == z` had the shape (..., 1)."""
    z = head_of(kind)(hidden_of())
    equal, unequal = z == z, z != z
    assert equal.shape == unequal.shape == (B, T, V)
    assert equal.dtype == unequal.dtype == torch.bool
    assert bool(equal.all())
    assert not bool(unequal.any())
    assert int(equal.sum()) == B * T * V


def test_w5_nan_is_unequal_to_itself(kind: str) -> None:
    head = head_of(kind)
    with torch.no_grad():
        head.bias[3] = torch.nan
    z = head(hidden_of())
    assert int((z != z).sum()) == B * T
    assert bool(torch.isnan(z)[..., 3].all())
    assert torch.equal((z != z).any(-1), torch.ones(B, T, dtype=torch.bool))


def test_w5_comparison_with_a_number_and_a_tensor(kind: str) -> None:
    z, dense = head_of(kind)(hidden_of()), head_of("dense")(hidden_of())
    best = dense.amax(-1, keepdim=True).detach()
    assert torch.equal((z == z.amax(-1, keepdim=True)).sum(-1), torch.ones(B, T, dtype=torch.long))
    assert torch.equal((z < 0).sum(-1), (dense < 0).sum(-1))
    assert torch.equal((z >= best - 1.0).sum(-1), (dense >= best - 1.0).sum(-1))
    assert torch.equal((z != 0).all(-1), (dense != 0).all(-1))


@pytest.mark.filterwarnings("ignore")
def test_w5_trace_of_a_one_row_argmax(kind: str) -> None:
    """Before: the traced function had the id of the example in it, for every input."""

    class Greedy(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.head: Any = linear if kind == "dense" else LMHead.from_linear(linear)

        def forward(self, hidden: Tensor) -> Tensor:
            chosen: Tensor = self.head(hidden).argmax(-1)
            return chosen

    torch.manual_seed(2)
    linear = nn.Linear(64, 5000, bias=False)  # large enough for the compiled core
    model = Greedy(linear)
    rows = torch.randn(12, 1, 64)
    expected = [int(linear(row).argmax(-1)) for row in rows]
    assert len(set(expected)) > 3
    with torch.no_grad():
        traced: Any = torch.jit.trace(model, (rows[0],), check_trace=True)  # type: ignore[no-untyped-call]
        assert [int(traced(row)) for row in rows] == expected


@pytest.mark.filterwarnings("ignore")
def test_w5_is_a_tensor(kind: str) -> None:
    z = head_of(kind)(hidden_of())
    assert isinstance(z, Tensor)
    assert torch.is_tensor(z)
    assert z.layout == torch.strided
    assert z.element_size() == 8
    assert not z.is_leaf
    assert z.grad_fn is not None
    assert torch.equal(z, z)
    assert torch.allclose(z, head_of("dense")(hidden_of()))
