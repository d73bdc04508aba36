// The model's answer to the text in the address: asked when the text changes, and only then.

import { next, type Token } from "../ask";
import { useAsked, type Asked } from "../asked";
import { Row, type Said } from "./row";

export interface Reading {
  readonly model: string;
  /** The prompt, as it was typed. */
  readonly text: string;
  /** The tokens of the prompt and of what came behind it. */
  readonly prompt: readonly Token[];
  readonly said: Said;
  readonly row: Row;
}

export function useNext(model: string, prompt: string | undefined, more: readonly number[]): Asked<Reading> {
  const key = prompt === undefined ? undefined : JSON.stringify([model, prompt, more]);
  return useAsked(key, (signal) => read(model, prompt ?? "", more, signal));
}

async function read(model: string, text: string, more: readonly number[], signal: AbortSignal): Promise<Reading> {
  const answer = await next({ model, prompt: text, more }, signal);
  const ids = answer.prompt.map(({ id }) => id);
  const said = { prompt: ids.slice(0, ids.length - more.length), output: more };
  return { model, text, prompt: answer.prompt, said, row: new Row(answer.logits) };
}
