// Penalties: which token ids they count, and the new logit of a token that came before.

export interface Context {
  /** Token ids of the prompt. */
  readonly prompt: readonly number[];
  /** Token ids that were generated after it. */
  readonly output: readonly number[];
}

/** Which ids the penalties count: Hugging Face and vLLM, or llama.cpp with its window. */
export type Counting = "hf" | "llama.cpp";

const WINDOW = 64; // llama.cpp's repeat_last_n

export type Edit = (logit: number) => number;

/** The ids that count for the repetition penalty. */
export function repeatedIds({ prompt, output }: Context, counting: Counting): number[] {
  const all = [...prompt, ...output];
  return counting === "hf" ? all : all.slice(-WINDOW);
}

/** The ids that count for the frequency and presence penalties. */
export function countedIds(context: Context, counting: Counting): number[] {
  return counting === "hf" ? [...context.output] : repeatedIds(context, counting);
}

/** A positive logit is divided by the penalty, a negative one multiplied; once per token. */
export function repetitionPenalty(ids: readonly number[], penalty: number): Map<number, Edit> {
  return new Map(ids.map((id) => [id, (logit) => (logit > 0 ? logit / penalty : logit * penalty)]));
}

/** Subtract `frequency` for each occurrence, and `presence` once. */
export function countPenalty(ids: readonly number[], frequency: number, presence: number): Map<number, Edit> {
  const times = new Map<number, number>();
  for (const id of ids) times.set(id, (times.get(id) ?? 0) + 1);
  return new Map([...times].map(([id, count]) => [id, (logit) => logit - (count * frequency + presence)]));
}

/** DRY: a token that would extend a repeated sequence of L ids loses multiplier · base^(L - allowed). */
export function dryPenalty(
  ids: readonly number[],
  multiplier: number,
  base: number,
  allowed: number,
): Map<number, Edit> {
  const reversed = [...ids].reverse();
  const longest = new Map<number, number>();
  matchesWithStart(reversed).forEach((length, at) => {
    if (at === 0 || length < allowed) return;
    const id = reversed[at - 1] ?? -1;
    longest.set(id, Math.max(longest.get(id) ?? 0, length));
  });
  const maxLength = base > 1.000001 ? Math.floor(88.7228391 / Math.log(base)) : Infinity; // base^maxLength fits in float32
  return new Map(
    [...longest].map(([id, length]) => [
      id,
      (logit) => logit - multiplier * base ** Math.min(length - allowed, maxLength),
    ]),
  );
}

/** For each index, how many elements from there on equal those from the start on (Z-function). */
function matchesWithStart(ids: readonly number[]): number[] {
  const z = ids.map(() => 0);
  if (ids.length) z[0] = ids.length;
  let [left, right] = [0, 0];
  for (let i = 1; i < ids.length; i++) {
    let length = i < right ? Math.min(right - i, z[i - left] ?? 0) : 0;
    while (i + length < ids.length && ids[length] === ids[i + length]) length++;
    z[i] = length;
    if (i + length > right) [left, right] = [i, i + length];
  }
  return z;
}
