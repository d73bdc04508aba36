// A question to the server that belongs to what the page shows: asked when it changes, given up when
// it changes again, asked once more where the server was busy, and on a button where it failed.

import { useEffect, useRef, useState } from "preact/hooks";
import { Refused, vocabulary } from "./ask";

export interface Asked<T> {
  /** The last answer: to this question if `current`, else to one before it. */
  readonly found: T | undefined;
  readonly current: boolean;
  readonly waiting: boolean;
  readonly failed: Refused | undefined;
  /** The same question once more. */
  again(): void;
  /** Wait no longer. */
  stop(): void;
}

interface State<T> {
  /** Which question, and how often it was asked, ended last. */
  readonly ended: string;
  readonly failed: Refused | undefined;
  readonly key: string | undefined;
  readonly found: T | undefined;
}

const PATIENCE = 5; // times that a busy server is asked again
const LONGEST = 10; // seconds between two of them

/** Ask when the key changes and has rested for so many milliseconds; undefined asks nothing. */
export function useAsked<T>(key: string | undefined, ask: (signal: AbortSignal) => Promise<T>, rest = 0): Asked<T> {
  const [state, setState] = useState<State<T>>({ ended: "", failed: undefined, key: undefined, found: undefined });
  const [turn, setTurn] = useState(0);
  const stopping = useRef<AbortController | undefined>(undefined);
  const question = `${turn} ${key}`;

  useEffect(() => {
    if (key === undefined) return;
    const stop = new AbortController();
    stopping.current = stop;
    const timer = window.setTimeout(() => {
      patiently(ask, stop.signal, PATIENCE).then(
        (found) => stop.signal.aborted || setState({ ended: question, failed: undefined, key, found }),
        (error: unknown) => stop.signal.aborted || setState((old) => ({ ...old, ended: question, failed: refusalOf(error) })),
      );
    }, rest);
    return () => {
      clearTimeout(timer);
      stop.abort();
    };
  }, [question]);

  const ended = state.ended === question;
  return {
    found: state.found,
    current: key !== undefined && state.key === key && state.found !== undefined,
    waiting: key !== undefined && !ended,
    failed: ended && key !== undefined ? state.failed : undefined,
    again: () => setTurn(turn + 1),
    stop: () => {
      stopping.current?.abort();
      setState((old) => ({ ...old, ended: question, failed: new Refused("", "stopped") }));
    },
  };
}

/** The text of every token, by id; undefined until it is known. */
export function useTexts(model: string | undefined): Asked<readonly string[]> {
  return useAsked(model, () => vocabulary(model ?? ""));
}

async function patiently<T>(ask: (signal: AbortSignal) => Promise<T>, signal: AbortSignal, left: number): Promise<T> {
  try {
    return await ask(signal);
  } catch (error) {
    if (!(error instanceof Refused) || error.code !== "busy" || !left) throw error;
    await new Promise((go) => setTimeout(go, 1000 * Math.min(LONGEST, error.facts["seconds"] ?? 1)));
    signal.throwIfAborted();
    return patiently(ask, signal, left - 1);
  }
}

function refusalOf(error: unknown): Refused {
  return error instanceof Refused ? error : new Refused(String(error), "");
}
