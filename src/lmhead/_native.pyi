"""The compiled core: kernels on tiles of logits, (words, tokens). See native/kernels.hpp."""

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
    pick_words: Tensor | None,
    pick_tokens: Tensor | None,
    pick_values: Tensor | None,
    columns: Tensor | None,
    rows: Tensor | None,
    threads: int,
) -> None: ...
def loss(
    z: Tensor,
    bias: Tensor | None,
    map: Map,
    targets: Tensor,
    lse: Tensor,
    picked: Tensor,
    mixed: Tensor | None,
    squared: Tensor | None,
    mix: Tensor | None,
    threads: int,
) -> float: ...
def pairs_f32(
    hidden: Tensor, weight: Tensor, rows: Tensor, ids: Tensor, out: Tensor, threads: int
) -> None: ...
def pairs_bf16(
    hidden: Tensor, weight: Tensor, rows: Tensor, ids: Tensor, out: Tensor, threads: int
) -> None: ...
def scatter_add(into: Tensor, ids: Tensor, from_: Tensor, threads: int) -> None: ...
def row_top(z: Tensor, max: Tensor, n: Tensor, threads: int) -> None: ...
def row_mass(z: Tensor, betas: Tensor, max: Tensor, out: Tensor, threads: int) -> None: ...
def row_moments(z: Tensor, max: Tensor, shift: Tensor, square: Tensor, threads: int) -> None: ...
def row_kth(z: Tensor, k: Tensor, value: Tensor, threads: int) -> None: ...
def row_reach(
    z: Tensor,
    beta: Tensor,
    max: Tensor,
    centre: Tensor,
    width: Tensor,
    limit: Tensor,
    radius: Tensor,
    threads: int,
) -> None: ...
def row_band(
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
def row_settle(
    z: Tensor,
    lse: Tensor,
    ids: Tensor,
    words: Tensor,
    keys: Tensor,
    token: Tensor,
    log_prob: Tensor,
    raw_log_prob: Tensor,
    kept_mass: Tensor,
    threads: int,
) -> None: ...
def row_race(z: Tensor, beta: Tensor, keys: Tensor, winners: Tensor, threads: int) -> None: ...
def row_contenders(
    z: Tensor,
    beta: Tensor,
    keys: Tensor,
    least: Tensor,
    counts: Tensor,
    ids: Tensor,
    threads: int,
) -> None: ...
def uniforms(keys: Tensor, stream: int, ids: Tensor, out: Tensor) -> None: ...
def tail_threshold(x: Tensor, mass: float) -> float: ...
def use(name: str) -> None: ...
def instruction_sets() -> list[str]: ...
def instruction_set() -> str: ...
def thread_runtime() -> str: ...

SCREEN_BLOCK: int

def screen_prepare(
    mean: Tensor,
    basis: Tensor,
    signs: Tensor,
    factors: Tensor,
    sizes: list[int],
    constants: tuple[float, float, float, float, float],
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
    approx: Tensor,
    block_max: Tensor,
    threads: int,
) -> None: ...
def screen_refine(
    nibbles: Tensor | None,
    scales: Tensor,
    states: Tensor,
    state_scales: Tensor,
    approx: Tensor,
    words_e: Tensor,
    words_n: Tensor,
    e: Tensor,
    n: Tensor,
    rows: Tensor,
    ids: Tensor,
    values: Tensor,
    threads: int,
) -> None: ...
def screen_best(approx: Tensor, block_max: Tensor, ids: Tensor, threads: int) -> None: ...
def screen_decide_f32(
    approx: Tensor,
    block_max: Tensor,
    words_e: Tensor,
    words_n: Tensor,
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

screen_decide_bf16 = screen_decide_f32

def screen_within(values: Tensor, base: Tensor, rows: Tensor, x: Tensor) -> bool: ...
def screen_masses(
    approx: Tensor,
    words_e: Tensor,
    words_n: Tensor,
    e: Tensor,
    n: Tensor,
    top: Tensor,
    factors: Tensor,
    lower: Tensor,
    upper: Tensor,
    threads: int,
) -> None: ...
def screen_select(
    approx: Tensor,
    block_max: Tensor,
    words_e: Tensor,
    words_n: Tensor,
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
    words: Tensor,
    ends: Tensor,
    fork: Tensor,
    branch: Tensor,
) -> None: ...
def tree_sums_f32(
    factors: Tensor, from_: Tensor, a: Tensor, b: Tensor, to: Tensor, threads: int
) -> None: ...
def tree_sums_bf16(
    factors: Tensor, from_: Tensor, a: Tensor, b: Tensor, to: Tensor, threads: int
) -> None: ...
def tree_best_f32(
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
def tree_best_bf16(
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
