// Scores of words that were said before: which ids count, and what becomes of their scores.

export interface Said {
  readonly prompt: readonly number[];
  /** What came behind it, one word after the other. */
  readonly output: readonly number[];
}

export type Whose = "hf" | "llama.cpp";

const LAST = 64; // llama.cpp looks back as far as this

/** The ids that count for the repetition penalty. */
export function repeated({ prompt, output }: Said, order: Whose): number[] {
  const all = [...prompt, ...output];
  return order === "hf" ? all : all.slice(-LAST);
}

/** The ids that count for frequency and presence. */
export function counted(said: Said, order: Whose): number[] {
  return order === "hf" ? [...said.output] : repeated(said, order);
}

/** Divided by the penalty if positive, times it if not; once, however often a word came. */
export function repetition(ids: readonly number[], penalty: number, score: (id: number) => number): Map<number, number> {
  return new Map(ids.map((id) => [id, score(id) > 0 ? score(id) / penalty : score(id) * penalty]));
}

/** Less `frequency` for each time that a word came, and less `presence` if it did. */
export function counts(
  ids: readonly number[],
  frequency: number,
  presence: number,
  score: (id: number) => number,
): Map<number, number> {
  const times = new Map<number, number>();
  for (const id of ids) times.set(id, (times.get(id) ?? 0) + 1);
  return new Map([...times].map(([id, count]) => [id, score(id) - (count * frequency + presence)]));
}
