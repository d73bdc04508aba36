// The model's answer to the text in the address: asked when the text changes, and only then.

import { useEffect, useState } from "preact/hooks";
import { next, vocabulary, type Token } from "../ask";
import { Row } from "./row";

export interface Reading {
  readonly prompt: readonly Token[];
  readonly row: Row;
}

export interface Next {
  readonly reading: Reading | undefined;
  readonly texts: readonly string[] | undefined;
  readonly waiting: boolean;
  readonly failed: string | undefined;
}

export function useNext(model: string, prompt: string, more: readonly number[]): Next {
  const [reading, setReading] = useState<Reading>();
  const [texts, setTexts] = useState<readonly string[]>();
  const [waiting, setWaiting] = useState(true);
  const [failed, setFailed] = useState<string>();

  useEffect(() => {
    setTexts(undefined);
    vocabulary(model).then(setTexts, (error: Error) => setFailed(error.message));
  }, [model]);

  useEffect(() => {
    const stop = new AbortController();
    setWaiting(true);
    setFailed(undefined);
    read(model, prompt, more, stop.signal).then(
      (found) => {
        setReading(found);
        setWaiting(false);
      },
      (error: Error) => {
        if (stop.signal.aborted) return;
        setFailed(error.message);
        setReading(undefined);
        setWaiting(false);
      },
    );
    return () => stop.abort();
  }, [model, prompt, more.join()]);

  return { reading, texts, waiting, failed };
}

async function read(model: string, prompt: string, more: readonly number[], signal: AbortSignal): Promise<Reading> {
  let answer = await next({ model, prompt }, signal);
  if (more.length) answer = await next({ model, ids: [...answer.prompt.map(({ id }) => id), ...more] }, signal);
  return { prompt: answer.prompt, row: new Row(answer.logits) };
}
