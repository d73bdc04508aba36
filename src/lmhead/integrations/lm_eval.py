"""lm-evaluation-harness: `LMHeadLM`, a model class that is registered as `lmhead`.

Importing this module registers the class. `lmhead eval` does that; the harness's own command is
`python -m lmhead.integrations.lm_eval run --model lmhead --model_args path=MODEL --tasks ...`.
Only the rows of the continuations go through the head, and no logits tensor is built.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from torch import nn
from tqdm import tqdm

from lmhead.analysis.token_text import piece_of
from lmhead.checks import check_integer
from lmhead.models import LanguageModel, open_model
from lmhead.sampling import Sampler, generate

DEFAULT_LENGTH = 2048  # of models without a bound, as the harness's `hf`
MAX_BYTES = 1 << 30
MAX_ROWS = 64  # of an automatic batch: larger ones are not faster

# A request of `loglikelihood`: its strings (None in rolling windows), ids of context and
# continuation.
Pair = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("lmhead")
class LMHeadLM(TemplateLM):  # type: ignore[misc]
    """Any model of `open_model`, for lm-evaluation-harness.

    Args:
        path: the argument of `open_model`, or an opened `LanguageModel`.
        batch_size: rows of a batch, or "auto": as many as `max_bytes` allow for their length.
        max_batch_size: most rows of an automatic batch.
        max_bytes: bound of the estimated memory of a batch, for "auto".
        max_length: context length; None for the model's.
        add_bos_token: whether prompts start with the special tokens of the tokenizer; None if it
            says so itself.
        prefix_token_id: token before a text that has no context; None for BOS, else EOS.
        think_end_token: text that ends the reasoning of a generated answer, which is dropped.
        download: whether `path` may be downloaded.
        device: ignored: models run on the CPU. (The harness's command always gives one.)

    Under torchrun every process evaluates its part of the requests.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | LanguageModel,
        *,
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
        max_bytes: int = MAX_BYTES,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | None = None,
        download: bool = False,
        device: str | None = None,  # noqa: ARG002
    ) -> None:
        super().__init__()
        opened = path if isinstance(path, LanguageModel) else open_model(path, download=download)
        if opened.tokenizer is None:
            raise ValueError("path must be a model with a tokenizer; this one has none")
        self.model, self._tokenizer = opened, opened.tokenizer
        self.batch_size = None if str(batch_size).startswith("auto") else int(batch_size)
        self.max_batch_size = MAX_ROWS if max_batch_size is None else int(max_batch_size)
        self.max_bytes = int(max_bytes)
        for name, value in (
            ("batch_size", 1 if self.batch_size is None else self.batch_size),
            ("max_batch_size", self.max_batch_size),
            ("max_bytes", self.max_bytes),
        ):
            check_integer(name, value, low=1)
        self.max_length = max_length or opened.max_length or DEFAULT_LENGTH
        check_integer("max_length", self.max_length, low=1, high=opened.max_length)
        self.add_bos_token, self.think_end_token = add_bos_token, think_end_token
        self._prefix = prefix_token_id
        self._bytes_per_token = bytes_per_token(opened)
        self._device = torch.device("cpu")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            if not dist.is_initialized():
                dist.init_process_group("gloo")
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()

    # --- tokens -----------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        ends = (self._tokenizer.eos_token_id, *self.model.eos_token_ids)
        end = next((id for id in ends if id is not None), None)
        if end is None:
            raise ValueError("prefix_token_id must be given: the model has neither BOS nor EOS")
        return end

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context: BOS, else EOS."""
        if self._prefix is not None:
            return self._prefix
        bos = self._tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_gen_toks(self) -> int:
        """Default number of tokens to generate."""
        return 256

    @property
    def tokenizer_name(self) -> str:
        """Name of the model, for the harness's cache of requests."""
        return self.model.name.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the ids of a text; one that starts with BOS gets no second one."""
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if special is None:
            special = not string.startswith(self._name_of(self.prefix_token_id))
        return self._tokenizer.encode(string, bos=special)

    def tok_decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return self._tokenizer.decode(ids)

    def _name_of(self, id: int) -> str:
        piece = piece_of(self.model, id)
        return piece.text if piece.special is None else piece.special

    # --- chat -------------------------------------------------------------------------------------

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the model's chat template; None if it is not asked for."""
        if not chat_template:
            return None
        if self.model.chat is None:
            raise ValueError(f"the model {self.model.name!r} has no chat template")
        return self.model.chat.template

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a conversation; without a generation prompt it ends with a message."""
        if self.model.chat is None:
            raise ValueError(f"the model {self.model.name!r} has no chat template")
        return self.model.chat.render(chat_history, continue_last=not add_generation_prompt)

    # --- log-likelihoods --------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is the greedy one."""
        # Requests that read the same tokens (answers of one token) share a row.
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, (_strings, context, continuation) in enumerate(requests):
            if not context or not 0 < len(continuation) <= self.max_length:
                raise ValueError(
                    f"a continuation must have from 1 to {self.max_length} tokens, after at least "
                    f"one; got {len(continuation)} after {len(context)}"
                )
            read = (context + continuation)[-(self.max_length + 1) : -1]
            groups.setdefault(tuple(read), []).append(number)
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        with self._progress("loglikelihood", len(requests), disable_tqdm) as progress:
            for batch in self._batches(sorted(groups, key=lambda read: (-len(read), read))):
                numbers = [groups[read] for read in batch]
                continuations = [[requests[n][2] for n in group] for group in numbers]
                answers = score_batch(self.model, batch, continuations)
                for number, answer in zip(chain(*numbers), answers, strict=True):
                    results[number] = answer
                    if (strings := requests[number][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", strings, answer)
                    progress.update()
        return results

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each text, in windows of the context length."""
        windows: list[Pair] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            (text,) = request.args
            rolling = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(utils.make_disjoint_window, rolling):
                windows.append((None, context, continuation))
                owners.append(number)
        totals = [0.0] * len(requests)
        remaining = Counter(owners)
        for first in range(0, len(windows), MAX_ROWS):
            part = windows[first : first + MAX_ROWS]
            for (value, _), owner in zip(
                self._loglikelihood_tokens(part, disable_tqdm), owners[first:], strict=False
            ):
                totals[owner] += value
                remaining[owner] -= 1
                if remaining[owner] == 0:
                    text = requests[owner].args
                    self.cache_hook.add_partial("loglikelihood_rolling", text, totals[owner])
        return totals

    # --- generation -------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the texts generated after each prompt, up to a stop string."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        texts = [""] * len(requests)
        with self._progress("generate_until", len(requests), disable_tqdm) as progress:
            for numbers in groups.values():
                options = normalize_gen_kwargs(requests[numbers[0]].args[1], self.max_gen_toks)
                prompts = self._prompts([requests[n].args[0] for n in numbers], options)
                order = sorted(range(len(numbers)), key=lambda i: (-len(prompts[i]), prompts[i]))
                rest = iter(order)
                for batch in self._batches([prompts[i] for i in order], options["max_gen_toks"]):
                    for text in self._generate(batch, options):
                        number = numbers[next(rest)]
                        texts[number] = text
                        self.cache_hook.add_partial("generate_until", requests[number].args, text)
                        progress.update()
        return texts

    def _prompts(self, texts: list[str], options: Any) -> list[tuple[int, ...]]:
        """Return the ids of prompts, cut on the left so that the answer fits."""
        longest = self.max_length - options["max_gen_toks"]
        if longest < 1:
            raise ValueError(
                f"max_gen_toks must be below {self.max_length}, the context length; "
                f"got {options['max_gen_toks']}"
            )
        return [tuple(self.tok_encode(text)[-longest:]) for text in texts]

    def _generate(self, prompts: Sequence[Sequence[int]], options: Any) -> Iterator[str]:
        settings = dict(options)
        stop = handle_stop_sequences(settings.pop("until", None), self._name_of(self.eot_token_id))
        count = settings.pop("max_gen_toks")
        sampler = Sampler(**settings) if settings.get("do_sample") else None
        generations = generate(
            self.model,
            [list(ids) for ids in prompts],
            sampler,
            max_new_tokens=count,
            stop=[text for text in stop if text],
        )
        for generation in generations:
            tokens = (
                generation.tokens[:-1] if generation.finish_reason == "eos" else generation.tokens
            )
            yield postprocess_generated_text(self.tok_decode(tokens), stop, self.think_end_token)

    # --- batches and processes --------------------------------------------------------------------

    def _progress(self, kind: str, total: int, disable: bool) -> Any:
        return tqdm(total=total, desc=f"Running {kind} requests", disable=disable or self.rank != 0)

    def _batches(
        self, rows: Sequence[tuple[int, ...]], new: int = 0
    ) -> Iterator[list[tuple[int, ...]]]:
        """Cut rows, longest first, into batches; `new` tokens are added to each row later."""
        first = 0
        while first < len(rows):
            size = self.batch_size
            if size is None:
                cost = (len(rows[first]) + new) * self._bytes_per_token
                size = max(1, min(self.max_bytes // cost, self.max_batch_size))
            yield list(rows[first : first + size])
            first += size

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all processes, concatenated."""
        if self.world_size == 1:
            return tensor
        flat = tensor.reshape(-1)
        parts = [torch.empty_like(flat) for _ in range(self.world_size)]
        dist.all_gather(parts, flat)
        return torch.cat(parts)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Return the objects of all processes to process `dst`, None to the others."""
        if self.world_size == 1:
            return [obj]
        objects: list[Any] | None = [None] * self.world_size if self.rank == dst else None
        dist.gather_object(obj, objects, dst=dst)
        return objects

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.world_size > 1:
            dist.barrier()


@torch.no_grad()
def score_batch(
    model: LanguageModel,
    rows: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[Sequence[int]]],
) -> list[tuple[float, bool]]:
    """Return (log-likelihood, whether it is the greedy one) of every continuation.

    A row has the tokens to read, all but the last of its continuations, which it ends with.
    """
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for row, read in enumerate(rows):
        ids[row, : len(read)] = torch.tensor(read)  # padding on the right changes nothing before it
    query_of: dict[tuple[int, int, int], int] = {}  # (row, position, token) -> its query
    indices = [
        [
            query_of.setdefault((row, len(rows[row]) - len(tokens) + i, token), len(query_of))
            for i, token in enumerate(tokens)
        ]
        for row, group in enumerate(continuations)
        for tokens in group
    ]
    row, position, token = torch.tensor(list(query_of)).T
    hidden = model.hidden(ids)[0][row, position]
    # The exact argmax takes the lowest id of equals, as torch's does.
    answers: Any = model.head(hidden).double().ask(log_prob=token, argmax=True)
    log_probs, greedy = answers.log_prob.tolist(), (answers.argmax == token).tolist()
    return [
        (sum(log_probs[i] for i in positions), all(greedy[i] for i in positions))
        for positions in indices
    ]


def bytes_per_token(model: LanguageModel) -> int:
    """Return an estimate of the memory of one token in a batch: activations, keys and values.

    Activations are taken as six times the widest layer (gate, value and product of a feed-forward
    network, in two layers) and eight times the hidden size.
    """
    width, layers, item = model.head.hidden_size, 1, model.head.weight.element_size()
    body = model.body
    if isinstance(body, nn.Module):
        sizes = [p.shape for p in body.parameters() if p.dim() == 2]
        inner = [max(size) for size in sizes if model.head.vocab_size not in size]
        width = max([width, *inner])
        lists = [len(m) for m in body.modules() if isinstance(m, nn.ModuleList)]
        layers = max(lists, default=1)
    hidden = model.head.hidden_size
    return item * (6 * width + 8 * hidden + 2 * layers * hidden)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
