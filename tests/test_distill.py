"""Distillation from a file of hidden states: what is stored, what is refused, what is learnt."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close, float64
from shared_data import SMOLLM2_HEAD, SMOLLM2_STATES, needs
from torch import Tensor

import lmhead
from lmhead import distill, reference
from lmhead.errors import ModelError


def teacher(*, dtype: torch.dtype = torch.float32, vocab: int = 300, **options: Any) -> Any:
    torch.manual_seed(1)
    head = lmhead.LMHead(48, vocab, dtype=dtype, **options)
    with torch.no_grad():
        head.weight.copy_(torch.randn(vocab, 48) / 3)
    return head


def states(rows: int = 96, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(2)
    hidden = torch.randn(rows, 48)
    hidden[:, 7] *= 20  # an outlier channel, as real models have
    return hidden.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_by_default_every_bit_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    head, hidden = teacher(dtype=dtype, bias=True, softcap=20.0, scale=0.9), states(dtype=dtype)
    ids = torch.arange(96)
    info = distill.save(hidden.view(4, 24, 48), tmp_path / "t", head=head, ids=ids.view(4, 24))
    assert (info.rows, info.vocab_size, info.kl_bound) == (96, 300, 0.0)
    with distill.TeacherFile(tmp_path / "t") as file:
        assert torch.equal(file.hidden(slice(None)), hidden)
        assert torch.equal(file.ids(slice(10, 20)), ids[10:20])
        assert torch.equal(file.head.weight, head.weight)
        same = lmhead.divergence(file.logits(slice(None)), head(hidden))
        assert_close(same, torch.zeros(96), atol=1e-6)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("options", [{}, {"softcap": 15.0}, {"scale": 0.5, "bias": True}], ids=str)
def test_the_bound_on_the_divergence_holds(
    tmp_path: Path, bits: int, options: dict[str, Any]
) -> None:
    """The exact KL of every row is below it, and the bound is of use."""
    head, hidden = teacher(**options), states()
    info = distill.save(hidden, tmp_path / "t", head=head, bits=bits)
    with distill.TeacherFile(tmp_path / "t") as file:
        stored = file.hidden(slice(None)).float()
    given = {"softcap": options.get("softcap"), "scale": options.get("scale", 1.0)}
    bias = None if head.bias is None else float64(head.bias)

    def logits(h: Tensor) -> Any:
        return reference.head_logits(float64(h), float64(head.weight), bias=bias, **given)

    true = reference.kl(logits(hidden), logits(stored))
    assert info.kl_bound is not None
    assert 0 < true.max() <= info.kl_bound < (0.3 if bits == 8 else 0.01)


def test_parts_are_written_one_after_the_other(tmp_path: Path) -> None:
    head, hidden = teacher(), states()
    parts = ((part, torch.full((len(part),), n)) for n, part in enumerate(torch.split(hidden, 25)))
    distill.save(parts, tmp_path / "t", head=head, bits=8)
    distill.save(hidden, tmp_path / "u", head=head, bits=8)
    with distill.TeacherFile(tmp_path / "t") as file, distill.TeacherFile(tmp_path / "u") as whole:
        assert torch.equal(file.hidden(slice(None)), whole.hidden(slice(None)))
        assert file.ids(slice(24, 27)).tolist() == [0, 1, 1]
        rows = [r for r, _ in file.batches(40)]
        assert rows == [slice(0, 40), slice(40, 80), slice(80, 96)]


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    """Any byte of header, head or rows; a byte less, a byte more."""
    path = tmp_path / "t"
    distill.save(states(), path, head=teacher(), bits=8)
    good = path.read_bytes()
    used = good[:4096].rstrip(b"\0")
    for at in (0, 20, len(used) - 3, 4096, 4096 + 3000, len(good) - 1):
        damaged = bytearray(good)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"corrupt|not a teacher file"):
            distill.TeacherFile(path)
    for data in (good[:-1], good + b"\0", b"", good[:100]):
        path.write_bytes(data)
        with pytest.raises(ModelError, match=r"corrupt|not a teacher file"):
            distill.TeacherFile(path)
    with pytest.raises(ModelError, match="cannot be read"):
        distill.TeacherFile(tmp_path / "none")
    path.write_bytes(good)
    distill.TeacherFile(path).close()


def test_what_does_not_match_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with pytest.raises(ValueError, match="head must have hidden size 48"):
        distill.save(states(), path, head=torch.randn(10, 47))
    with pytest.raises(ValueError, match="hidden must be finite"):
        distill.save(torch.full((2, 48), torch.nan), path, head=teacher())
    assert not list(tmp_path.iterdir())  # nothing is left of a failed attempt
    distill.save(states(), path)
    with distill.TeacherFile(path) as file, pytest.raises(ValueError, match="head must be given"):
        file.logits(slice(0, 2))
    with pytest.raises(ValueError, match="head must have hidden size 48"):
        distill.TeacherFile(path, head=torch.randn(10, 47))
    student = lmhead.LMHead(8, 301)
    with (
        distill.TeacherFile(path, head=teacher()) as file,
        pytest.raises(ValueError, match="q must have logits of the shape of p"),
    ):
        distill.loss(file, slice(0, 96), student(torch.randn(96, 8)))


@pytest.mark.parametrize("kind", ["kl", "jsd"])
def test_a_hundred_steps_follow_those_on_full_logits(tmp_path: Path, kind: str) -> None:
    """The same student, batches and optimizer: the curves agree to 1e-4, and the loss falls."""
    head, hidden = teacher(vocab=500), states(256)
    distill.save(hidden, tmp_path / "t", head=head)
    full = (hidden @ head.weight.T).detach()
    torch.manual_seed(3)
    inputs = torch.randn(256, 12)
    first: Any = torch.nn.Sequential(
        torch.nn.Linear(12, 24), torch.nn.Tanh(), lmhead.LMHead(24, 500)
    )
    second = copy.deepcopy(first)
    curves: list[list[float]] = [[], []]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3) for m in (first, second)]
    with distill.TeacherFile(tmp_path / "t") as file:
        for step in range(100):
            start = 64 * (step % 4)
            rows = slice(start, start + 64)
            ours = distill.loss(file, rows, first(inputs[rows]), kind=kind, temperature=2.0).mean()
            log_p = (full[rows] / 2.0).log_softmax(-1)
            log_q = (F.linear(second[:2](inputs[rows]), second[2].weight) / 2.0).log_softmax(-1)
            if kind == "kl":
                dense = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
            else:
                log_m = torch.logaddexp(log_p, log_q) - torch.tensor(2.0).log()
                halves = [
                    F.kl_div(log_m, x, log_target=True, reduction="batchmean") / 2
                    for x in (log_p, log_q)
                ]
                dense = halves[0] + halves[1]
            for curve, loss, optimizer in zip(curves, (ours, dense), optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                curve.append(float(loss.detach()))
    assert_close(torch.tensor(curves[0]), torch.tensor(curves[1]), atol=1e-4)
    assert curves[0][-1] < 0.9 * curves[0][0]


@needs(SMOLLM2_STATES, SMOLLM2_HEAD)
def test_size_beside_full_logits(tmp_path: Path) -> None:
    """Real hidden states of SmolLM2: 512 rows, and the head once."""
    from safetensors.torch import load_file

    hidden = load_file(SMOLLM2_STATES)["hidden"][:512]
    weight = load_file(SMOLLM2_HEAD)["weight"]
    for bits, per_row in ((16, 1152), (8, 576 + 72)):
        info = distill.save(hidden, tmp_path / "t", head=weight, bits=bits)
        assert info.bytes == 4096 + weight.numel() * 2 + 512 * per_row
        rows = info.logits_bytes / (512 * per_row)
        assert rows > (30 if bits == 16 else 70)  # without the head, which is there once
        print(f"{bits} bits: {rows:.0f} times smaller per row, bound {info.kl_bound:.2g} nats")


def test_command(tmp_path: Path) -> None:
    """`lmhead distill-cache`: the windows' hidden states, with their ids."""
    from click.testing import CliRunner
    from tiny_models import write_model

    from lmhead.cli import main

    model = write_model(tmp_path / "model")
    (tmp_path / "text").write_text("hello ab cab hello\n" * 9, encoding="utf-8")
    arguments = [str(model), str(tmp_path / "text"), "--out", str(tmp_path / "t"), "--bits", "32"]
    run = CliRunner().invoke(main, ["distill-cache", *arguments, "--window", "10"])
    assert run.exit_code == 0, run.output
    assert "times as many" in run.output
    opened = lmhead.open_model(str(model))
    assert opened.tokenizer is not None
    ids = opened.tokenizer.encode((tmp_path / "text").read_text())
    with distill.TeacherFile(tmp_path / "t") as file:
        assert (len(file), file.info.window) == (len(ids), 10)
        assert file.ids(slice(None)).tolist() == list(ids)
        hidden, _ = opened.hidden(torch.tensor([ids[10:20]]))
        assert_close(file.hidden(slice(10, 20)), hidden[0], atol=1e-6)
