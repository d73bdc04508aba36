// The model's answer to the text in the address: asked when the text changes, and only then.

import { useEffect, useState } from "preact/hooks";
import { next, vocabulary, type Token } from "../ask";
import { Row, type Said } from "./row";

export interface Reading {
  /** The tokens of the prompt and of what came behind it. */
  readonly prompt: readonly Token[];
  readonly said: Said;
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

  // Behind the row: words without a text are better than none, and the server works one by one.
  useEffect(() => {
    let wanted = true;
    setTexts(undefined);
    vocabulary(model).then(
      (found) => wanted && setTexts(found),
      (error: Error) => wanted && setFailed(error.message),
    );
    return () => void (wanted = false);
  }, [model]);

  return { reading, texts, waiting, failed };
}

async function read(model: string, prompt: string, more: readonly number[], signal: AbortSignal): Promise<Reading> {
  const answer = await next({ model, prompt, more }, signal);
  const ids = answer.prompt.map(({ id }) => id);
  return { prompt: answer.prompt, said: { prompt: ids.slice(0, ids.length - more.length), output: more }, row: new Row(answer.logits) };
}
