"""The compiled core: kernels on tiles of logits, (tokens, rows). See native/kernels.hpp."""

from collections.abc import Sequence

from torch import Tensor

Map = tuple[float, float, bool, float, float]

def softmax(
    z: Tensor,
    bias: Tensor | None,
    map: Map,
    m: Tensor,
    s: Tensor,
    t: Tensor | None,
    lo: int,
    heap_values: Tensor | None,
    heap_ids: Tensor | None,
    heap_sizes: Tensor | None,
    rank_mine: Tensor | None,
    rank_slack: Tensor | None,
    rank_per_norm: Tensor | None,
    rank_norms: Tensor | None,
    rank_counts: Tensor | None,
    threads: int,
) -> list[tuple[int, int, int]]: ...
def gradient(
    z: Tensor,
    high: Tensor,
    low: Tensor,
    a: Tensor,
    b: Tensor | None,
    mix: Tensor | None,
    mixed: Tensor | None,
    map: Map,
    pick_tokens: Tensor | None,
    pick_rows: Tensor | None,
    pick_values: Tensor | None,
    token_sums: Tensor | None,
    row_sums: Tensor | None,
    threads: int,
) -> None: ...
def pairs(
    hidden: Tensor, weight: Tensor, rows: Tensor, ids: Tensor, out: Tensor, threads: int
) -> None: ...
def row_logits(
    hidden: Tensor, weight: Tensor, out: Tensor, threads: int, square: Tensor | None = None
) -> None: ...
def product(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    transposed: bool,
    add: bool,
    threads: int,
    ids: Tensor | None = None,
) -> None: ...
def scatter_add(into: Tensor, ids: Tensor, from_: Tensor, threads: int) -> None: ...
def row_max(z: Tensor, max: Tensor, n: Tensor, threads: int) -> None: ...
def row_softmax_sums(z: Tensor, betas: Tensor, max: Tensor, out: Tensor, threads: int) -> None: ...
def row_moments(z: Tensor, max: Tensor, shift: Tensor, square: Tensor, threads: int) -> None: ...
def row_kth_largest(z: Tensor, k: Tensor, value: Tensor, threads: int) -> None: ...
def row_mass_radius(
    z: Tensor,
    beta: Tensor,
    max: Tensor,
    centre: Tensor,
    width: Tensor,
    limit: Tensor,
    radius: Tensor,
    threads: int,
) -> None: ...
def row_range(
    z: Tensor, lo: Tensor, hi: Tensor, counts: Tensor, ids: Tensor, values: Tensor, threads: int
) -> None: ...
def row_nucleus(
    z: Tensor,
    beta: Tensor,
    max: Tensor,
    centre: Tensor,
    limit: Tensor,
    least: int,
    counts: Tensor,
    ids: Tensor,
    values: Tensor,
    threads: int,
) -> None: ...
def row_draw(
    z: Tensor,
    lse: Tensor,
    ids: Tensor,
    logits: Tensor,
    keys: Tensor,
    token: Tensor,
    log_prob: Tensor,
    raw_log_prob: Tensor,
    kept_mass: Tensor,
    threads: int,
) -> None: ...
def row_gumbel_argmax(
    z: Tensor, beta: Tensor, keys: Tensor, winners: Tensor, threads: int
) -> None: ...
def uniforms(keys: Tensor, stream: int, ids: Tensor, out: Tensor) -> None: ...
def tail_threshold(x: Tensor, mass: float) -> float: ...
def fast_product() -> bool: ...
def use(name: str) -> None: ...
def instruction_sets() -> list[str]: ...
def instruction_set() -> str: ...
def thread_runtime() -> str: ...

class DecodeModel: ...

def decode_model(
    matrices: list[Tensor],
    types: list[str],
    norms: list[Tensor],
    heads: int,
    key_heads: int,
    head_size: int,
    eps: float,
    interleaved: bool,
) -> DecodeModel: ...
def decode_step(
    model: DecodeModel,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    used: Sequence[int],
    threads: int,
) -> None: ...
def stored_product(blocks: Tensor, type: str, x: Tensor, out: Tensor, threads: int) -> None: ...
def quantize_rows(
    weight: Tensor,
    mean: Tensor,
    basis: Tensor,
    signs: Tensor,
    factors: Tensor,
    sizes: list[int],
    mean_norm: float,
    constants: tuple[float, float, float, float, float],
    codes: Tensor,
    lead: Tensor,
    numbers: Tensor,
    threads: int,
) -> tuple[float, float]: ...
def column_sums(weight: Tensor, sums: Tensor, threads: int) -> None: ...
def hash_bytes(bytes: Tensor, threads: int) -> str: ...

SCREEN_BLOCK: int

def prefetch() -> tuple[int, int]: ...
def advise_huge_pages(bytes: Tensor) -> None: ...
def streams() -> tuple[int, int]: ...
def set_streams(whole: int, nibbles: int) -> None: ...
def set_prefetch(whole: int, nibbles: int) -> None: ...
def screen_prepare(
    mean: Tensor,
    basis: Tensor,
    signs: Tensor,
    factors: Tensor,
    sizes: list[int],
    constants: tuple[float, float, float, float, float, float],
    hidden: Tensor,
    main: Tensor,
    lead: Tensor,
    numbers: Tensor,
    threads: int,
) -> None: ...
def screen_products(
    whole: Tensor | None,
    nibbles: Tensor | None,
    lead: Tensor,
    scales: Tensor,
    lead_scales: Tensor,
    bias: Tensor | None,
    states: Tensor,
    lead_states: Tensor,
    state_scales: Tensor,
    lead_state_scales: Tensor,
    allowed: Tensor | None,
    approx: Tensor,
    block_max: Tensor,
    threads: int,
) -> int: ...
def screen_refine(
    nibbles: Tensor | None,
    scales: Tensor,
    states: Tensor,
    state_scales: Tensor,
    approx: Tensor,
    token_e: Tensor,
    token_n: Tensor,
    e: Tensor,
    n: Tensor,
    rows: Tensor,
    ids: Tensor,
    values: Tensor,
    threads: int,
) -> None: ...
def screen_best(approx: Tensor, block_max: Tensor, ids: Tensor, threads: int) -> None: ...
def screen_decide(
    approx: Tensor,
    block_max: Tensor,
    token_e: Tensor,
    token_n: Tensor,
    block_e: Tensor,
    block_n: Tensor,
    e: Tensor,
    n: Tensor,
    base: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    most: int,
    values: Tensor,
    ids: Tensor,
    threads: int,
) -> tuple[int, bool, bool]: ...
def screen_within(values: Tensor, base: Tensor, rows: Tensor, x: Tensor) -> bool: ...
def screen_sample(
    approx: Tensor,
    block_max: Tensor,
    token_e: Tensor,
    token_n: Tensor,
    block_e: Tensor,
    block_n: Tensor,
    e: Tensor,
    n: Tensor,
    base: Tensor,
    low: Tensor | None,
    low_e: Tensor,
    scales: Tensor,
    states: Tensor,
    state_scales: Tensor,
    allowed: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    map: tuple[float, float, bool, float, float],
    mean_norm: float,
    kinds: Tensor,
    least: Tensor,
    values: Tensor,
    flags: Tensor,
    keys: Tensor,
    starts: Tensor,
    ids: Tensor,
    logits: Tensor,
    whole: Tensor,
    numbers: Tensor,
    threads: int,
) -> None: ...
def screen_select(
    approx: Tensor,
    block_max: Tensor,
    token_e: Tensor,
    token_n: Tensor,
    block_e: Tensor,
    block_n: Tensor,
    e: Tensor,
    n: Tensor,
    limits: Tensor,
    counts: Tensor,
    ids: Tensor,
    threads: int,
) -> int: ...
def tree_paths(
    parent: Tensor,
    branches: Tensor,
    vocab: int,
    tokens: Tensor,
    ends: Tensor,
    fork: Tensor,
    branch: Tensor,
) -> None: ...
def tree_sums(
    factors: Tensor, from_: Tensor, a: Tensor, b: Tensor, to: Tensor, threads: int
) -> None: ...
def tree_best(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    start: Tensor,
    child: Tensor,
    vocab: int,
    values: Tensor,
    ids: Tensor,
    opened: Tensor,
    threads: int,
) -> None: ...
