// The tiles of a loss with gradients, as in `make_plan` of lmhead/sweep/questions.py. A test compares both.

export const MIB = 2 ** 20;
export const DEFAULT_MAX_BYTES = 128 * MIB;
const MAX_TILE_TOKENS = 8192;
const MAX_CHUNK_ROWS = 1024;
const MIN_RETAINED = 64;
const SCRATCH = 3;
/** Matrix products are computed in float32, whatever the dtype of the tensors. */
const ITEM = 4;

export interface Plan {
  /** Rows per chunk, vocabulary entries per tile. */
  readonly chunkRows: number;
  readonly tileTokens: number;
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
  const maxTokens = Math.max(1, Math.min(MAX_TILE_TOKENS, Math.ceil(vocab / 2)));
  const tokenCost = converts ? width : 0;
  const rowCost = 3 * width + 16;
  const cost = (chunkRows: number, tileTokens: number, kept: number): number =>
    (kept + SCRATCH * tileTokens) * chunkRows + tileTokens * tokenCost + chunkRows * rowCost;
  const fitRows = (tileTokens: number, kept: number, maxRows: number): number => {
    const perRow = cost(1, tileTokens, kept) - tileTokens * tokenCost;
    return Math.max(1, Math.min(maxRows, Math.floor((budget - tileTokens * tokenCost) / perRow)));
  };

  let tileTokens = maxTokens;
  while (tileTokens > 512 && tileTokens * tokenCost > Math.floor(budget / 4)) tileTokens = Math.floor(tileTokens / 2);
  let chunkRows = fitRows(tileTokens, vocab, rows);
  if (chunkRows >= Math.min(MIN_RETAINED, rows) && cost(chunkRows, tileTokens, vocab) <= budget) {
    chunkRows = balanced(rows, chunkRows);
    return { chunkRows, tileTokens, retained: true, bytes: cost(chunkRows, tileTokens, vocab) * ITEM };
  }

  chunkRows = Math.min(MAX_CHUNK_ROWS, rows);
  tileTokens = maxTokens;
  const minTokens = Math.min(8, maxTokens);
  while (tileTokens > minTokens && cost(chunkRows, tileTokens, tileTokens) > budget)
    tileTokens = Math.max(minTokens, Math.floor(tileTokens / 2));
  if (cost(chunkRows, tileTokens, tileTokens) > budget) chunkRows = fitRows(tileTokens, tileTokens, chunkRows);
  chunkRows = balanced(rows, chunkRows);
  return { chunkRows, tileTokens, retained: false, bytes: cost(chunkRows, tileTokens, tileTokens) * ITEM };
}

/** Chunks of equal size, a multiple of 16 where that fits: no small last chunk. */
function balanced(rows: number, chunkRows: number): number {
  const chunks = Math.ceil(rows / chunkRows);
  const even = Math.ceil(rows / chunks);
  const up = Math.ceil(even / 16) * 16;
  const down = Math.floor(chunkRows / 16) * 16;
  if (up <= chunkRows) return up;
  const last = rows % down;
  const smallLast = down < 32 || (last > 0 && last < 16);
  return chunks === 1 || smallLast ? Math.min(chunkRows, even) : down;
}
