"""Chat templates: the text that transformers would make, and nothing that a template may not do."""

import json
from pathlib import Path
from typing import Any

import pytest

from lmhead.errors import ModelError
from lmhead.models import LanguageModel, bundled, load_huggingface, open_model
from lmhead.models.chat import Chat
from models import gguf_files, hf_folders

CHATML = (
    "{% for message in messages %}{{'<s>' + message['role'] + '\n' + message['content'] + '</s>'"
    " + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
WITH_ALL = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "clown" %}
        {{- raise_exception("no clowns") }}
    {%- endif %}
    {%- if message.content == "skip" %}{% continue %}{% endif %}
    {%- if message.role == "assistant" %}
        {% generation %}{{ message.content | trim }}{% endgeneration %}
    {%- else %}
        {{- "[" ~ message.role ~ "] " ~ (message.content | tojson) ~ strftime_now("%%") }}
    {%- endif %}
{%- endfor %}
{{- "end" if add_generation_prompt and not tools and not documents }}{{ eos_token }}
"""
TALK = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": "skip"},
    {"role": "assistant", "content": "  a thing "},
    {"role": "user", "content": 'Say "é" \\ 你好'},
]


def make(folder: Path, template: Any = CHATML, **more: Any) -> LanguageModel:
    hf_folders.write(folder)
    special = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config = kind | special | {"chat_template": template} | more
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_huggingface(folder)


def chat_of(model: LanguageModel) -> Chat:
    assert model.chat is not None
    return model.chat


def theirs(folder: Path, messages: list[dict[str, str]]) -> tuple[str, list[int]]:
    tokenizer = hf_folders.transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return text, list(found["input_ids"])


@pytest.mark.parametrize("template", [CHATML, WITH_ALL], ids=["chatml", "all"])
def test_the_text_and_ids_of_transformers(tmp_path: Path, template: str) -> None:
    chat = chat_of(make(tmp_path, template))
    text, ids = theirs(tmp_path, TALK)
    assert chat.render(TALK) == text
    assert chat.encode(TALK) == ids


def test_templates_in_a_list_and_in_a_file(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
    assert chat_of(make(tmp_path, named)).template == CHATML
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert chat_of(load_huggingface(tmp_path)).render(TALK) == "Be brief & <kind>.!"
    assert theirs(tmp_path, TALK)[0] == "Be brief & <kind>.!"


def test_no_template(tmp_path: Path) -> None:
    assert make(tmp_path, None).chat is None
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_huggingface(tmp_path).chat is None


def test_a_conversation_that_the_model_does_not_take(tmp_path: Path) -> None:
    chat = chat_of(make(tmp_path, WITH_ALL))
    with pytest.raises(ValueError, match="does not accept this conversation: no clowns"):
        chat.render([{"role": "clown", "content": "Ha"}])


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{{ undefined.name }}",
        "{{ 1 / 0 }}",
        "{{ messages[7].content.x }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include 'x' %}",
        "{{ range(10000000) | list }}",
    ],
)
def test_damaged_and_hostile_templates(tmp_path: Path, template: str) -> None:
    chat = chat_of(make(tmp_path, template))
    with pytest.raises(ModelError, match=r"tokenizer_config.json cannot be used"):
        chat.render(TALK)


def test_what_is_no_template(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="chat_template must be a string; got 7"):
        make(tmp_path, 7)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match=r"chat_template.jinja cannot be read"):
        load_huggingface(tmp_path)


def test_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "small.gguf"
    gguf_files.write(path, entries={"tokenizer.chat_template": CHATML})
    chat = chat_of(open_model(path))
    (folder,) = (tmp_path / "cache").glob("gguf/*")
    assert (chat.render(TALK), chat.encode(TALK)) == theirs(folder, TALK)
    assert chat.names["eos_token"] == "</s>"
    gguf_files.write(path)
    assert open_model(path).chat is None


@pytest.mark.skipif(bundled.find("smollm2") is None, reason="smollm2: lmhead models add smollm2")
def test_smollm2() -> None:
    chat = chat_of(open_model("smollm2"))
    text = chat.render([{"role": "user", "content": "Hello"}])
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert chat.encode([{"role": "user", "content": "Hello"}]).count(2) == 2  # <|im_end|>
