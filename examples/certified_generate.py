"""Certified decode inside `transformers.generate`: the tokens of full precision, from an int8 copy.

`head.screen()` makes a quantized copy of the output layer. Greedy search of transformers then asks
the lazy logits for their argmax, which is decided from the copy, with a proof.

    pip install 'lmhead[models]'
    python examples/certified_generate.py --model FOLDER
    python examples/certified_generate.py --quick       # a random model, seconds
"""

import argparse
import time
from pathlib import Path

import torch
from hf_model import load

import lmhead


def main() -> None:
    """Generate with and without the copy, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="Hugging Face folder [default: SmolLM2]")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="a random model")
    given = parser.parse_args()

    model, tokenizer = load(given.model, quick=given.quick)
    model.eval()
    ids = torch.tensor([tokenizer(given.prompt)["input_ids"]])

    def generate() -> list[int]:
        started = time.perf_counter()
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8 if given.quick else given.tokens,
            do_sample=False,
        )
        print(f"  {time.perf_counter() - started:.2f} s")
        return made[0, ids.shape[1] :].tolist()

    print("nn.Linear")
    expected = generate()
    lmhead.replace_head(model)
    screened = model.lm_head.screen()
    print("LMHead with a copy of the weight")
    tokens = generate()
    print(tokenizer.decode(tokens))
    print("the same tokens:", tokens == expected)

    with torch.no_grad():
        hidden = model.get_decoder()(ids).last_hidden_state[0]
    certificate = screened.argmax(hidden).certificate
    rows = certificate.rows_rescored.float().mean()
    print(f"rows of the weight that were read: {rows:.1f} on average")


if __name__ == "__main__":
    main()
