// A request that follows the page's state: sent when its key changes, aborted when it changes again,
// retried while the server is busy, and on a button after an error.
//
// Responses are kept while the tab is open, so that going back to a page shows its results at once. A
// streamed response arrives in parts; if it is stopped or fails, the parts that have arrived stay.

import { useEffect, useRef, useState } from "preact/hooks";
import { fetchVocabulary, ServerError } from "./api";

export interface RequestState<T> {
  /** The last response: to this request if `current`, else to an earlier one. */
  readonly data: T | undefined;
  readonly current: boolean;
  /** Whether all of it has arrived. */
  readonly complete: boolean;
  readonly loading: boolean;
  readonly error: ServerError | undefined;
  /** Send the same request again. */
  retry(): void;
  /** Abort the request. */
  stop(): void;
}

/** `partial` takes what has arrived so far. */
export type Send<T> = (signal: AbortSignal, partial: (data: T) => void) => Promise<T>;

interface State<T> {
  /** The request that ended last: attempt and key. */
  readonly ended: string;
  readonly error: ServerError | undefined;
  readonly key: string | undefined;
  readonly data: T | undefined;
  readonly complete: boolean;
}

const RETRIES = 5; // when the server is busy
const MAX_WAIT_SECONDS = 10; // between two retries
const KEPT = 24; // responses

const responses = new Map<string, unknown>();

function keep(key: string, data: unknown): void {
  responses.delete(key);
  responses.set(key, data);
  for (const old of [...responses.keys()].slice(0, -KEPT)) responses.delete(old);
}

/** Send a request `rest` milliseconds after the key changed; undefined sends none. Keys start with the kind of request. */
export function useRequest<T>(key: string | undefined, send: Send<T>, rest = 0): RequestState<T> {
  const [turn, setTurn] = useState(0);
  const attempt = `${turn} ${key}`;
  const [state, setState] = useState<State<T>>({
    ended: "",
    error: undefined,
    key: undefined,
    data: undefined,
    complete: false,
  });
  const abort = useRef<AbortController | undefined>(undefined);
  const kept = key === undefined || turn ? undefined : (responses.get(key) as T | undefined);

  useEffect(() => {
    if (key === undefined) return;
    if (kept !== undefined) {
      setState({ ended: attempt, error: undefined, key, data: kept, complete: true });
      return;
    }
    const stop = new AbortController();
    abort.current = stop;
    const arrived = (data: T, complete: boolean): void => {
      if (stop.signal.aborted) return;
      setState((old) => ({ ended: complete ? attempt : old.ended, error: undefined, key, data, complete }));
      if (complete) keep(key, data);
    };
    const timer = window.setTimeout(() => {
      withRetries(send, stop.signal, (data) => arrived(data, false), RETRIES).then(
        (data) => arrived(data, true),
        (error: unknown) =>
          stop.signal.aborted || setState((old) => ({ ...old, ended: attempt, error: toServerError(error) })),
      );
    }, rest);
    return () => {
      clearTimeout(timer);
      stop.abort();
    };
  }, [attempt]);

  const shown = kept === undefined ? state : { ended: attempt, error: undefined, key, data: kept, complete: true };
  const ended = shown.ended === attempt;
  return {
    data: shown.data,
    current: key !== undefined && shown.key === key && shown.data !== undefined,
    complete: shown.key === key && shown.complete,
    loading: key !== undefined && !ended,
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

async function withRetries<T>(
  send: Send<T>,
  signal: AbortSignal,
  partial: (data: T) => void,
  left: number,
): Promise<T> {
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
