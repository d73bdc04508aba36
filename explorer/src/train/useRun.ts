// The run that the server was given, asked again and again while the page is seen: only new lines come.

import { useEffect, useState } from "preact/hooks";
import { Refused, news } from "../ask";
import { heard, stateOf, type Answer, type News, type Run } from "./run";

const [SOON_MS, LATER_MS] = [1000, 5000];

export interface Watched {
  /** Undefined until the first answer; null where the server was given no folder. */
  readonly run: Run | null | undefined;
  /** What went wrong with the last question. */
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
    let paused = false; // nobody looks: asked again when somebody does
    const wait = (ms: number): void => {
      if (document.hidden) paused = true;
      else timer = window.setTimeout(look, ms);
    };
    const look = (): void => {
      news<Answer>(last, stop.signal).then(
        (answer) => {
          setFailed(undefined);
          if (answer.run === null) return setRun(null);
          known = heard(known, answer);
          last = answer;
          setRun(known);
          wait(answer.more ? 0 : stateOf(known) === "training" ? SOON_MS : LATER_MS);
        },
        (error: Error) => {
          if (stop.signal.aborted) return;
          setFailed(error instanceof Refused ? error.message : "");
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
