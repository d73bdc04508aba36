// Request rows of logits for a prompt, or a comparison on a text.

import { request, fetchNext, postStream, type Token } from "../api";
import { useRequest, type RequestState, type Send } from "../useRequest";
import { Row } from "../sampler/row";

/** Two models with different vocabularies: the first difference. */
export interface Different {
  readonly comparable: false;
  readonly reason: "sizes" | "token" | "cut";
  readonly place: number | null;
  readonly a: number | string;
  readonly b: number | string;
}

type Best = Token & { readonly p: number };

/** One position of a text; log-probabilities and divergences are null where they are infinite. */
export interface Place {
  readonly position: number;
  readonly token: Token;
  readonly log_prob_a: number | null;
  readonly log_prob_b: number | null;
  readonly kl: number | null;
  readonly total_variation: number | null;
  readonly best_a: Best;
  readonly best_b: Best;
}

export interface TextComparison {
  readonly comparable: true;
  readonly positions: number;
  readonly kl: number | null;
  readonly max_kl: number | null;
  readonly total_variation: number | null;
  readonly agreement: number;
  readonly perplexity: readonly [number | null, number | null] | null;
  readonly first: Token;
  readonly places: readonly Place[];
}

/** Rows of one model, or of two. */
export interface Rows {
  readonly comparable: true;
  readonly models: readonly [string, string];
  readonly prompt: readonly Token[];
  readonly rows: readonly [Row, Row];
}

const REST_MS = 300;

/** For a prompt: requested when models or prompt change, not by sliders. */
export function useRows(on: boolean, a: string, b: string, prompt: string): RequestState<Rows | Different> {
  return useRequest(on ? `rows ${JSON.stringify([a, b, prompt])}` : undefined, (signal) => rows(a, b, prompt, signal));
}

/** For a text: requested when a slider pauses. */
export function useTextComparison(question: object | undefined): RequestState<TextComparison | Different> {
  const send: Send<TextComparison | Different> = (signal, partial) =>
    postStream("/api/compare", question ?? {}, signal, partial);
  return useRequest(question && `compare ${JSON.stringify(question)}`, send, REST_MS);
}

async function rows(a: string, b: string, prompt: string, signal: AbortSignal): Promise<Rows | Different> {
  if (a !== b) {
    const query = new URLSearchParams({ a, b });
    const response = await request(`/api/comparable?${query}`, { signal });
    const result = (await response.json()) as Different | { comparable: true };
    if (!result.comparable) return result;
  }
  const one = await fetchNext({ model: a, prompt }, signal);
  if (a === b) {
    const row = new Row(one.logits);
    return { comparable: true, models: [a, b], prompt: one.prompt, rows: [row, row] };
  }
  const two = await fetchNext({ model: b, prompt }, signal);
  const [mine, yours] = [one.prompt, two.prompt].map((tokens) => tokens.map(({ id }) => id)) as [number[], number[]];
  const place = mine.findIndex((id, at) => id !== yours[at]);
  if (place >= 0 || mine.length !== yours.length) {
    const at = place >= 0 ? place : mine.length;
    return { comparable: false, reason: "cut", place: at, a: mine[at] ?? "—", b: yours[at] ?? "—" };
  }
  return { comparable: true, models: [a, b], prompt: one.prompt, rows: [new Row(one.logits), new Row(two.logits)] };
}
