// The tiles of a loss with gradients, as in `make_plan` of lmhead/sweep/questions.py. A test compares both.

export const MIB = 2 ** 20;
export const DEFAULT_MAX_BYTES = 128 * MIB;
const WORDS = 8192;
const TOKENS = 1024;
const MIN_RETAINED = 32;
const SCRATCH = 3;
/** Matrix products are computed in float32, whatever the dtype of the tensors. */
const ITEM = 4;

export interface Plan {
  /** Tokens per chunk, vocabulary entries per tile. */
  readonly tokens: number;
  readonly words: number;
  /** Whether all tiles of a chunk are kept until its gradients are done. */
  readonly retained: boolean;
  /** Temporary memory. */
  readonly bytes: number;
}

export function makePlan(
  rows: number,
  vocab: number,
  width: number,
  converts: boolean,
  maxBytes = DEFAULT_MAX_BYTES,
): Plan {
  const budget = Math.floor(maxBytes / ITEM);
  const mostWords = Math.max(1, Math.min(WORDS, Math.ceil(vocab / 2)));
  const wordCost = converts ? width : 0;
  const tokenCost = 3 * width + 16;
  const cost = (tokens: number, words: number, kept: number): number =>
    (kept + SCRATCH * words) * tokens + words * wordCost + tokens * tokenCost;
  const fitTokens = (words: number, kept: number, most: number): number => {
    const perToken = cost(1, words, kept) - words * wordCost;
    return Math.max(1, Math.min(most, Math.floor((budget - words * wordCost) / perToken)));
  };

  let words = mostWords;
  while (words > 512 && words * wordCost > Math.floor(budget / 4)) words = Math.floor(words / 2);
  let tokens = fitTokens(words, vocab, rows);
  if (tokens >= Math.min(MIN_RETAINED, rows) && cost(tokens, words, vocab) <= budget) {
    tokens = balanced(rows, tokens);
    return { tokens, words, retained: true, bytes: cost(tokens, words, vocab) * ITEM };
  }

  tokens = Math.min(TOKENS, rows);
  words = mostWords;
  const least = Math.min(8, mostWords);
  while (words > least && cost(tokens, words, words) > budget) words = Math.max(least, Math.floor(words / 2));
  if (cost(tokens, words, words) > budget) tokens = fitTokens(words, words, tokens);
  tokens = balanced(rows, tokens);
  return { tokens, words, retained: false, bytes: cost(tokens, words, words) * ITEM };
}

/** Chunks of equal size, a multiple of 16 where that fits: no small last chunk. */
function balanced(rows: number, tokens: number): number {
  const even = Math.ceil(rows / Math.ceil(rows / tokens));
  return Math.min(tokens, Math.ceil(even / 16) * 16);
}
