// Request the score of a text when the text changes.

import { postStream, type Token } from "../api";
import { useRequest, type RequestState } from "../useRequest";

/** A scored token, see docs/json.md; null means infinite. */
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
  /** The first token, which is not scored. */
  readonly first: Token;
  readonly tokens: readonly Scored[];
}

export function useScore(model: string, text: string | undefined): RequestState<Score> {
  const key = text === undefined ? undefined : `score ${JSON.stringify([model, text])}`;
  return useRequest(key, (signal, partial) =>
    // The first line has no totals yet.
    postStream<Score>(
      "/api/score",
      { model, text },
      signal,
      (score, progress) => progress?.done && partial(score, progress),
    ),
  );
}

/** All tokens, including the first. */
export function everyToken({ first, tokens }: Score): readonly Token[] {
  return [first, ...tokens];
}

/** The start of the window in which the token at `position` was scored, as in `lmhead score`. */
export function windowStart(position: number, { window, stride }: Pick<Sums, "window" | "stride">): number {
  return Math.max(0, Math.ceil((position - window) / stride)) * stride;
}
