"""Constrained decoding: JSON of a schema, one of a few answers, and a mask of your own.

A grammar gives a mask before each token. Lazy logits take it without building a row: a mask that
leaves few tokens reads only their rows of the weight.

    pip install 'lmhead[grammar]'
    python examples/constrained_decoding.py smollm2
    python examples/constrained_decoding.py --quick      # on tiny, seconds
"""

import argparse
import json

import torch

import lmhead
from lmhead.sampling.grammar import Grammar

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "London"]}, "large": {"type": "boolean"}},
    "required": ["city", "large"],
    "additionalProperties": False,
}


def main() -> None:
    """Generate under three constraints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="tiny", help="what open_model takes")
    parser.add_argument("--quick", action="store_true", help="no effect: the program takes seconds")
    given = parser.parse_args()
    model = lmhead.open_model(given.model)

    # 1. A JSON schema.
    grammar = Grammar.json_schema(SCHEMA)
    made = lmhead.generate(model, "The answer as JSON: ", max_new_tokens=60, grammar=grammar)
    print("schema:", json.loads(made.text))

    # 2. One of a few texts, with a sampler.
    grammar = Grammar.choice([" yes", " no", " perhaps"])
    sampler = lmhead.Sampler(temperature=1.0, seed=3)
    made = lmhead.generate(model, "Is it raining?", sampler, max_new_tokens=8, grammar=grammar)
    print("choice:", made.text)

    # 3. A mask of your own, on lazy logits: only tokens that are letters and spaces.
    ids = torch.tensor([model.tokenizer.encode("I love")])
    vocab = model.head.vocab_size
    texts = [model.tokenizer.decode([token]) for token in range(vocab)]
    letters = torch.tensor([text.replace(" ", "").isalpha() for text in texts])
    with torch.no_grad():
        hidden, _ = model.hidden(ids)
        logits = model.head(hidden[0, -1:]).mask_tokens(letters)
    best = logits.topk(3)
    print("mask:  ", [texts[token] for token in best.indices[0].tolist()])


if __name__ == "__main__":
    main()
