// The question of this page: a text's score, asked when the text changes, and only then.

import { post, type Token } from "../ask";
import { useAsked, type Asked } from "../asked";

/** A token with its figures, as in docs/json.md; null for what is infinite. */
export interface Scored extends Token {
  readonly logit: number | null;
  readonly p: number;
  readonly processed_p: number;
  readonly log_prob: number | null;
  readonly rank: number;
  readonly cut_by: null;
  readonly position: number;
  readonly entropy: number;
  readonly bits: number | null;
}

export interface Sums {
  readonly perplexity: number | null;
  readonly bits_per_byte: number | null;
  readonly bits_per_token: number | null;
  readonly log_prob: number | null;
  readonly scored_tokens: number;
  readonly scored_bytes: number;
  readonly entropy: number;
  readonly first_choices: number;
  readonly in_top_10: number;
  readonly window: number;
  readonly stride: number;
}

export interface Score extends Sums {
  /** The token at the beginning, which nothing comes before. */
  readonly first: Token;
  readonly tokens: readonly Scored[];
}

export function useScore(model: string, text: string | undefined): Asked<Score> {
  const key = text === undefined ? undefined : JSON.stringify([model, text]);
  return useAsked(key, async (signal) => (await (await post("/api/score", { model, text }, signal)).json()) as Score);
}

/** All tokens of the text, with the first one. */
export function everyToken({ first, tokens }: Score): readonly Token[] {
  return [first, ...tokens];
}

/** Where the window begins through which the token at `position` was seen, as in `lmhead score`. */
export function windowStart(position: number, { window, stride }: Pick<Sums, "window" | "stride">): number {
  return Math.max(0, Math.ceil((position - window) / stride)) * stride;
}
