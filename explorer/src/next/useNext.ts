// The model's logits for the text in the address, requested when the text changes.

import { fetchNext, type Token } from "../api";
import { useRequest, type RequestState } from "../useRequest";
import type { Context } from "../sampler/penalties";
import { Row } from "../sampler/row";

export interface Reading {
  readonly model: string;
  /** The prompt as it was typed. */
  readonly text: string;
  /** The tokens of the prompt and the generated ones. */
  readonly prompt: readonly Token[];
  readonly context: Context;
  readonly row: Row;
}

export function useNext(model: string, prompt: string | undefined, more: readonly number[]): RequestState<Reading> {
  const key = prompt === undefined ? undefined : `next ${JSON.stringify([model, prompt, more])}`;
  return useRequest(key, (signal) => read(model, prompt ?? "", more, signal));
}

async function read(model: string, text: string, more: readonly number[], signal: AbortSignal): Promise<Reading> {
  const answer = await fetchNext({ model, prompt: text, more }, signal);
  const ids = answer.prompt.map(({ id }) => id);
  const context = { prompt: ids.slice(0, ids.length - more.length), output: more };
  return { model, text, prompt: answer.prompt, context, row: new Row(answer.logits) };
}
