"""`head.screen()`: lazy logits answer argmax and top-k through the copy, with the same results."""

import copy
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from lmhead import LMHead
from lmhead.screen import ScreenedHead
from screen import heads

pytestmark = pytest.mark.both_cores


@pytest.fixture
def head() -> LMHead:
    return heads.head_of(heads.plain(700, 64, torch.Generator().manual_seed(0)))


@pytest.fixture
def hidden() -> Tensor:
    return heads.normal(2, 3, 64, random=torch.Generator().manual_seed(1))


class Asked:
    """A screen that counts the questions it answered."""

    def __init__(self, inside: ScreenedHead) -> None:
        self.inside, self.answered = inside, 0

    def decide(self, source: Any, k: int) -> Any:
        found = self.inside.decide(source, k)
        self.answered += found is not None
        return found

    def compatible_source(self, source: Any) -> Any:
        return self.inside.compatible_source(source)


@pytest.fixture
def asked(head: LMHead) -> Asked:
    asked = Asked(head.screen())
    head.screened = asked
    return asked


def same(head: LMHead, question: Any) -> None:
    """The question with and without the screen."""
    screen, head.screened = head.screened, None
    wanted = question(head)
    head.screened = screen
    torch.testing.assert_close(question(head), wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    "question",
    [
        lambda z: z.argmax(-1),
        lambda z: z.argmax(-1, keepdim=True),
        lambda z: torch.argmax(z, dim=-1),
        lambda z: tuple(z.topk(5)),
        lambda z: tuple(z.max(-1)),
        lambda z: tuple((z / 0.7).topk(5)),
        lambda z: tuple(((z / 3).tanh() * 3).topk(5)),
        lambda z: z.log_softmax(-1).argmax(-1),
        lambda z: tuple(z.log_softmax(-1).topk(3)),
        lambda z: z[:, -1].argmax(-1),
        lambda z: z.view(-1, 700).argmax(-1),
        lambda z: z.masked_fill(torch.arange(700) < 600, -torch.inf).argmax(-1),
        lambda z: tuple(z.double().topk(2)),
    ],
)
def test_the_screen_answers(head: LMHead, asked: Asked, hidden: Tensor, question: Any) -> None:
    same(head, lambda head: question(head(hidden)))
    assert asked.answered == 1


@pytest.mark.parametrize(
    "question",
    [
        lambda z: (-z).argmax(-1),
        lambda z: z[..., 5:].argmax(-1),
        lambda z: z[..., :5].argmax(-1),
        lambda z: tuple(z.topk(0)),
    ],
)
def test_what_it_cannot_answer_is_swept(
    head: LMHead, asked: Asked, hidden: Tensor, question: Any
) -> None:
    same(head, lambda head: question(head(hidden)))
    assert asked.answered == 0


def test_with_gradients_the_sweep_answers(head: LMHead, asked: Asked, hidden: Tensor) -> None:
    leaf = hidden.clone().requires_grad_()
    head(leaf).max(-1).values.sum().backward()
    assert leaf.grad is not None
    assert asked.answered == 0


def test_a_changed_weight_is_swept(head: LMHead, asked: Asked, hidden: Tensor) -> None:
    with torch.no_grad():
        head.weight.neg_()
    same(head, lambda head: head(hidden).argmax(-1))
    assert asked.answered == 0


def test_a_copied_model_is_swept(head: LMHead, hidden: Tensor) -> None:
    head.screen()
    twin = copy.deepcopy(head)
    with torch.no_grad():
        head.weight.zero_()
    same(twin, lambda head: head(hidden).argmax(-1))


def test_a_loaded_copy_is_attached(head: LMHead, hidden: Tensor, tmp_path: Any) -> None:
    ScreenedHead(head, bits="4+4").save(tmp_path / "copy")
    screened = ScreenedHead.load(tmp_path / "copy", head).attach()
    assert head.screened is screened
    same(head, lambda head: head(hidden).argmax(-1))


def test_inference_mode(head: LMHead, asked: Asked, hidden: Tensor) -> None:
    masked = torch.arange(700) < 600
    with torch.inference_mode():
        same(head, lambda head: head(hidden).masked_fill(masked, -torch.inf).argmax(-1))
        same(head, lambda head: head(hidden).argmax(-1))
        born = heads.head_of(head.weight.clone(), torch.zeros(700))
        born.screen()
        same(born, lambda head: head(hidden).argmax(-1))
    assert asked.answered == 2


def test_the_state_dict_does_not_hold_the_copy(head: LMHead) -> None:
    before = head.state_dict().keys()
    head.screen()
    assert head.state_dict().keys() == before


SMALL: dict[str, Any] = {
    "vocab_size": 311,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def model_of(family: str) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if family == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    if family == "gemma2":
        config = transformers.Gemma2Config(**SMALL, final_logit_softcapping=0.2)
        return transformers.Gemma2ForCausalLM(config)
    config = transformers.GPT2Config(
        vocab_size=311, n_embd=32, n_layer=1, n_head=2, n_positions=64, eos_token_id=None
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("bits", [8, "4+4"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_hugging_face_models_generate_the_same_tokens(family: str, bits: Any) -> None:
    model = model_of(family).eval().requires_grad_(False)
    prompt = torch.tensor([[1, 5, 9, 200], [1, 7, 7, 7]])
    options: dict[str, Any] = {
        "max_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(prompt),
    }
    wanted = model.generate(prompt, **options)
    head = LMHead.from_linear(model.lm_head)
    model.lm_head = head
    asked = Asked(head.screen(bits=bits))
    head.screened = asked
    assert torch.equal(model.generate(prompt, **options), wanted)
    assert asked.answered == 12
    states = model.base_model(wanted).last_hidden_state
    assert asked.inside.verify(states, k=5).disagreements == 0
