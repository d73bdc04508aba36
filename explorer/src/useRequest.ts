// A request that follows the page's state: sent when its key changes, aborted when it changes again,
// retried while the server is busy, and on a button after an error.
//
// Responses are kept while the tab is open, so that going back to a page shows its results at once. A
// streamed response arrives in parts; if it is stopped, fails or is left, the parts that have arrived stay.

import { useEffect, useRef, useState } from "preact/hooks";
import { fetchVocabulary, ServerError, type Progress } from "./api";

export interface RequestState<T> {
  /** The last response: to this request if `current`, else to an earlier one. */
  readonly data: T | undefined;
  readonly current: boolean;
  /** Whether all of it has arrived. */
  readonly complete: boolean;
  readonly loading: boolean;
  /** How much of a streamed response has arrived. */
  readonly progress: Progress | undefined;
  /** Seconds until all of it will have arrived, by the pace so far. */
  readonly secondsLeft: number | undefined;
  readonly error: ServerError | undefined;
  /** Send the same request again. */
  retry(): void;
  /** Abort the request. */
  stop(): void;
}

/** `partial` takes what has arrived so far. */
export type Send<T> = (signal: AbortSignal, partial: Partial<T>) => Promise<T>;
type Partial<T> = (data: T, progress: Progress | undefined) => void;

interface State<T> {
  /** The request that ended last: attempt and key. */
  readonly ended: string;
  readonly error: ServerError | undefined;
  readonly key: string | undefined;
  readonly data: T | undefined;
  readonly complete: boolean;
  readonly progress: Progress | undefined;
  /** When the first part arrived, in ms. */
  readonly since: number;
}

const EMPTY = {
  ended: "",
  error: undefined,
  key: undefined,
  data: undefined,
  complete: false,
  progress: undefined,
  since: 0,
};
const RETRIES = 5; // when the server is busy
const MAX_WAIT_SECONDS = 10; // between two retries
const KEPT = 24; // responses

interface Kept {
  readonly data: unknown;
  readonly complete: boolean;
  readonly progress: Progress | undefined;
}

const responses = new Map<string, Kept>();

function keep(key: string, response: Kept): void {
  responses.delete(key);
  responses.set(key, response);
  for (const old of [...responses.keys()].slice(0, -KEPT)) responses.delete(old);
}

/** Send a request `rest` milliseconds after the key changed; undefined sends none. Keys start with the kind of request. */
export function useRequest<T>(key: string | undefined, send: Send<T>, rest = 0): RequestState<T> {
  const [turn, setTurn] = useState(0);
  const attempt = `${turn} ${key}`;
  const [state, setState] = useState<State<T>>(EMPTY);
  const abort = useRef<AbortController | undefined>(undefined);
  const kept = key === undefined || turn ? undefined : responses.get(key);
  const restored: State<T> | undefined = kept && {
    ...EMPTY,
    ...(kept as Kept & { data: T }),
    ended: attempt,
    error: kept.complete ? undefined : new ServerError("", "stopped"),
    key,
  };

  useEffect(() => {
    if (key === undefined) return;
    if (restored) {
      setState(restored);
      return;
    }
    const stop = new AbortController();
    abort.current = stop;
    let latest: Kept | undefined;
    const arrived = (data: T, complete: boolean, progress: Progress | undefined): void => {
      if (stop.signal.aborted) return;
      latest = { data, complete, progress };
      if (complete) keep(key, latest);
      setState((old) => {
        const first = old.key !== key || old.complete || old.data === undefined;
        const since = first ? performance.now() : old.since;
        return { ended: complete ? attempt : "", error: undefined, key, data, complete, progress, since };
      });
    };
    const timer = window.setTimeout(() => {
      withRetries(send, stop.signal, (data, progress) => arrived(data, false, progress), RETRIES).then(
        (data) => arrived(data, true, undefined),
        (error: unknown) =>
          stop.signal.aborted || setState((old) => ({ ...old, ended: attempt, error: toServerError(error) })),
      );
    }, rest);
    return () => {
      clearTimeout(timer);
      stop.abort();
      if (latest?.progress?.done) keep(key, latest); // to be found again when the page is
    };
  }, [attempt]);

  const shown = restored ?? state;
  const ended = shown.ended === attempt;
  const loading = key !== undefined && !ended;
  const { progress } = shown;
  const seconds = (performance.now() - shown.since) / 1000;
  return {
    data: shown.data,
    current: key !== undefined && shown.key === key && shown.data !== undefined,
    complete: shown.key === key && shown.complete,
    loading,
    progress: shown.key === key ? progress : undefined,
    secondsLeft: loading && progress?.done ? (seconds * (progress.all - progress.done)) / progress.done : undefined,
    error: ended && key !== undefined ? shown.error : undefined,
    retry: () => setTurn(turn + 1),
    stop: () => {
      abort.current?.abort();
      setState((old) => ({ ...old, ended: attempt, error: new ServerError("", "stopped") }));
    },
  };
}

/** The text of every token, by id. */
export function useVocabulary(model: string | undefined): RequestState<readonly string[]> {
  return useRequest(model && `vocabulary ${model}`, () => fetchVocabulary(model ?? ""));
}

async function withRetries<T>(send: Send<T>, signal: AbortSignal, partial: Partial<T>, left: number): Promise<T> {
  try {
    return await send(signal, partial);
  } catch (error) {
    if (!(error instanceof ServerError) || error.code !== "busy" || !left) throw error;
    await new Promise((go) => setTimeout(go, 1000 * Math.min(MAX_WAIT_SECONDS, error.facts["seconds"] ?? 1)));
    signal.throwIfAborted();
    return withRetries(send, signal, partial, left - 1);
  }
}

function toServerError(error: unknown): ServerError {
  return error instanceof ServerError ? error : new ServerError(String(error), "");
}
