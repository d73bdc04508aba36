"""Encoders and decoders of transformers: `lmhead translate` gives the tokens of its `generate`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.run_command import run
from integrations.tiny_hf import FAMILIES, VOCAB, transformers

from lmhead.errors import ModelError
from lmhead.models import load_translator, open_model
from models import hf_folders

WORDS = [f"t{i}" for i in range(4, VOCAB)]


def marian() -> Any:
    bart = FAMILIES["bart"]().config
    sizes = {name: value for name, value in bart.to_dict().items() if name != "model_type"}
    model = transformers.MarianMTModel(transformers.MarianConfig(**sizes))
    model.final_logits_bias.normal_()
    return model


MAKE = {**{name: FAMILIES[name] for name in ("t5", "t5 untied", "bart")}, "marian": marian}


def write(folder: Path, name: str, **changes: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    torch.manual_seed(0)
    model = MAKE[name]().eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8)  # peaked, as a trained model is
    model.generation_config.eos_token_id = 2
    for key, value in changes.items():
        setattr(model.generation_config, key, value)
    model.save_pretrained(folder)
    names = ["<pad>", "<s>", "</s>", "<unk>", *WORDS]
    cut = Tokenizer(models.WordLevel({word: i for i, word in enumerate(names)}, unk_token="<unk>"))
    cut.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    cut.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    cut.save(str(folder / "tokenizer.json"))
    return model


def theirs(model: Any, text: str, **options: Any) -> list[int]:
    ids = torch.tensor([[WORDS.index(word) + 4 for word in text.split()] + [2]])
    made: list[int] = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, **options
    )[0].tolist()
    return made


TEXTS = ["t5 t9 t33", "t60", "t7 t8 t9 t10 t11"]


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("beams", [1, 3])
def test_the_tokens_of_transformers(tmp_path: Path, name: str, beams: int) -> None:
    model = write(tmp_path, name)
    found = load_translator(tmp_path).translate(TEXTS, num_beams=beams, max_new_tokens=8)
    for text, best in zip(TEXTS, found, strict=True):
        expected = theirs(model, text, num_beams=beams)[1:]
        cut = expected.index(2) + 1 if 2 in expected else len(expected)
        assert list(best[0].ids) == expected[:cut]


def test_a_forced_first_token(tmp_path: Path) -> None:
    model = write(tmp_path, "bart", forced_bos_token_id=9)
    (best,) = load_translator(tmp_path).translate(["t5"], num_beams=1, max_new_tokens=7)
    assert theirs(model, "t5")[2:][: len(best[0].ids)] == list(best[0].ids)


def test_the_command(tmp_path: Path) -> None:
    write(tmp_path, "t5")
    done = run("translate", str(tmp_path), "t5 t9", "--json", "--max-tokens", "4")
    assert json.loads(done.stdout)["translations"][0]["source"] == "t5 t9"


def test_open_model_names_the_command(tmp_path: Path) -> None:
    write(tmp_path, "t5")
    with pytest.raises(ModelError, match=r"got 't5'; an encoder and decoder, which `lmhead tr"):
        open_model(tmp_path)


def test_a_decoder_is_refused(tmp_path: Path) -> None:
    hf_folders.write(tmp_path)
    with pytest.raises(ModelError, match=r"must be an encoder and decoder .*; got 'llama'"):
        load_translator(tmp_path)
