// Poll the training run while the page is visible; responses contain new lines only.

import { useEffect, useState } from "preact/hooks";
import { ServerError, fetchRun } from "../api";
import { addNews, stateOf, type Answer, type News, type Run } from "./trainingRun";

const [SOON_MS, LATER_MS] = [1000, 5000];

export interface Watched {
  /** Undefined until the first response; null if the server has no run. */
  readonly run: Run | null | undefined;
  /** The error of the last request. */
  readonly failed: string | undefined;
}

export function useRun(): Watched {
  const [run, setRun] = useState<Run | null>();
  const [failed, setFailed] = useState<string>();

  useEffect(() => {
    const stop = new AbortController();
    let known: Run | undefined;
    let last: News | undefined;
    let timer: number | undefined;
    let paused = false; // while the page is hidden
    const wait = (ms: number): void => {
      if (document.hidden) paused = true;
      else timer = window.setTimeout(look, ms);
    };
    const look = (): void => {
      fetchRun<Answer>(last, stop.signal).then(
        (answer) => {
          setFailed(undefined);
          if (answer.run === null) return setRun(null);
          known = addNews(known, answer);
          last = answer;
          setRun(known);
          wait(answer.more ? 0 : stateOf(known) === "training" ? SOON_MS : LATER_MS);
        },
        (error: Error) => {
          if (stop.signal.aborted) return;
          setFailed(error instanceof ServerError ? error.message : "");
          wait(LATER_MS);
        },
      );
    };
    const back = (): void => {
      if (document.hidden || !paused) return;
      paused = false;
      look();
    };
    document.addEventListener("visibilitychange", back);
    look();
    return () => {
      stop.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", back);
    };
  }, []);

  return { run, failed };
}
