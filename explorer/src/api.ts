// Requests to the server: models, vocabulary, one row of logits, continuations, training runs.

import { decoded, lengthOf } from "./utf8";

export interface Model {
  readonly name: string;
  /** The name or path given to `lmhead explore`, which opens the model again. */
  readonly given: string;
  readonly vocab_size: number;
  readonly hidden_size: number;
  readonly parameters: number | null;
  readonly max_length: number | null;
  /** What computes the body: core, torch or llama.cpp. */
  readonly engine: string;
  /** Token ids that end a text. */
  readonly eos_token_ids: readonly number[];
  readonly text: boolean;
  /** The page's languages that its tokenizer covers. */
  readonly languages: readonly string[];
}

export interface Token {
  readonly id: number;
  readonly text: string;
  readonly bytes: readonly number[];
}

export interface NextRow {
  readonly prompt: readonly Token[];
  readonly logits: Float32Array;
}

/** Continuations by name. */
export type Paths = Readonly<Record<Path["name"], Path | undefined>>;

/** A continuation by one decoding method. */
export interface Path {
  readonly name: "greedy" | "sampler" | "beam";
  readonly tokens: readonly {
    readonly id: number;
    /** Null while beam search runs. */
    readonly log_prob: number | null;
    readonly sampler_log_prob: number | null;
  }[];
  readonly log_prob: number;
  /** Whether it ended with an end token. */
  readonly ended: boolean;
}

/** An error response of the server. */
export class ServerError extends Error {
  constructor(
    message: string,
    /** The server's error code; "offline" if it did not respond, "stopped" if the user stopped the request. */
    readonly code: string,
    /** Numbers for the message, such as limits. */
    readonly facts: Readonly<Record<string, number>> = {},
  ) {
    super(message);
  }
}

/** The open models and the version of lmhead. */
export async function fetchModels(): Promise<{ readonly lmhead: string; readonly models: readonly Model[] }> {
  return (await (await request("/api/models")).json()) as { lmhead: string; models: Model[] };
}

/** The text of every token, by id. */
export async function fetchVocabulary(model: string): Promise<readonly string[]> {
  return (await cachedVocabulary(model)).texts;
}

/** Tokens with text and bytes, by id. */
export async function fetchTokens(model: string, ids: readonly number[]): Promise<readonly Token[]> {
  const { names, odd } = await cachedVocabulary(model);
  return ids.map((id) => {
    const text = names[id] ?? "";
    return { id, text, bytes: odd.get(id) ?? [...new TextEncoder().encode(text)] };
  });
}

interface Vocabulary {
  /** Texts by id; tokens that are not text have a name. */
  readonly names: readonly string[];
  /** The same, with partial characters escaped: see `escaped`. */
  readonly texts: readonly string[];
  /** The bytes of tokens whose text does not encode to them. */
  readonly odd: ReadonlyMap<number, readonly number[]>;
}

const vocabularyCache = new Map<string, Promise<Vocabulary>>();

/** Requested once per model. */
function cachedVocabulary(model: string): Promise<Vocabulary> {
  const found = vocabularyCache.get(model);
  if (found) return found;
  const made = request(`/api/vocabulary?${new URLSearchParams({ model })}`)
    .then((answer) => answer.json() as Promise<(string | [string, number[]])[]>)
    .then((entries) => ({
      names: entries.map((entry) => (typeof entry === "string" ? entry : entry[0])),
      texts: entries.map((entry) => (typeof entry === "string" ? entry : escaped(...entry))),
      odd: new Map(entries.flatMap((entry, id) => (typeof entry === "string" ? [] : [[id, entry[1]] as const]))),
    }));
  made.catch(() => vocabularyCache.delete(model)); // so that the next call requests it again
  vocabularyCache.set(model, made);
  return made;
}

/** Map bytes that are not valid UTF-8 to U+DC80 and following, so that adjacent tokens can be joined to characters. */
export function escaped(name: string, bytes: readonly number[]): string {
  let [text, i] = ["", 0];
  while (i < bytes.length) {
    const byte = bytes[i] ?? 0;
    const length = lengthOf(byte);
    const c = byte < 0x80 ? String.fromCharCode(byte) : decoded(bytes.slice(i, i + length));
    text += c ?? String.fromCharCode(0xdc00 + byte);
    i += c === undefined ? 1 : length;
  }
  return bytes.length ? text : name;
}

export async function fetchNext(
  question: { model: string; more?: readonly number[] } & ({ prompt: string } | { ids: readonly number[] }),
  signal: AbortSignal,
): Promise<NextRow> {
  const response = await post("/api/next", question, signal);
  const bytes = await response.arrayBuffer();
  const size = new DataView(bytes).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, size))) as { prompt: Token[] };
  return { prompt: header.prompt, logits: new Float32Array(bytes, 4 + size) };
}

/** How the head computes the logits of some tokens. */
export interface Products extends TokenWeights {
  /** The hidden state after the last token. */
  readonly hidden: readonly number[];
}

/** What the head holds for some tokens. */
export interface TokenWeights {
  /** The weights of each token. */
  readonly weights: readonly (readonly number[])[];
  readonly bias: readonly number[] | null;
  /** Applied after the dot product. */
  readonly scale: number;
  readonly softcap: number | null;
}

export async function fetchProducts(
  question: { model: string; ids: readonly number[]; tokens: readonly number[] },
  signal: AbortSignal,
): Promise<Products> {
  return (await (await post("/api/products", question, signal)).json()) as Products;
}

/** The weights of some tokens; does not run the model. */
export async function fetchWeights(
  question: { model: string; tokens: readonly number[] },
  signal: AbortSignal,
): Promise<TokenWeights> {
  return (await (await post("/api/products", question, signal)).json()) as TokenWeights;
}

/** New lines of the training log since the last response. */
export async function fetchRun<T>(last: { end: number; mark: string } | undefined, signal: AbortSignal): Promise<T> {
  const query = last ? `?${new URLSearchParams({ after: String(last.end), mark: last.mark })}` : "";
  return (await (await request(`/api/run${query}`, { signal })).json()) as T;
}

/** How much of a streamed response has arrived. */
export interface Progress {
  readonly done: number;
  readonly all: number;
}

/**
 * Send a JSON body and read the response line by line; `partial` takes what has arrived so far. Lists of objects are
 * appended to those of the lines before, everything else replaces.
 */
export async function postStream<T>(
  path: string,
  question: object,
  signal: AbortSignal,
  partial: (data: T, progress: Progress | undefined) => void,
): Promise<T> {
  const response = await post(path, { ...question, stream: true }, signal);
  let [document, progress]: [Record<string, unknown>, Progress | undefined] = [{}, undefined];
  const add = (line: string): void => {
    const { error, progress: now, ...fields } = JSON.parse(line) as Line;
    if (error) throw toError(error, "");
    if (now) progress = { done: now[0], all: now[1] };
    const joined = Object.entries(fields).map(([name, value]): [string, unknown] => {
      const before = document[name];
      const rows = Array.isArray(value) && value.every((row) => typeof row === "object");
      return [name, rows && Array.isArray(before) ? [...(before as unknown[]), ...(value as unknown[])] : value];
    });
    document = { ...document, ...Object.fromEntries(joined) };
  };
  const decoder = new TextDecoder();
  let rest = "";
  const reader = response.body?.getReader();
  for (let part = await read(reader, signal); part; part = await read(reader, signal)) {
    const lines = (rest + decoder.decode(part, { stream: true })).split("\n");
    rest = lines.pop() ?? "";
    lines.forEach(add);
    if (lines.length) partial(document as T, progress);
  }
  return document as T;
}

interface Line {
  readonly error?: ErrorBody;
  readonly progress?: readonly [number, number];
}

async function read(
  reader: ReadableStreamDefaultReader<Uint8Array> | undefined,
  signal: AbortSignal,
): Promise<Uint8Array | undefined> {
  const { value } = (await reader?.read().catch((error: Error) => {
    if (signal.aborted) throw error;
    throw new ServerError(error.message, "offline");
  })) ?? { value: undefined };
  return value;
}

/** Send a JSON body; throws `ServerError` for an error response. */
export function post(path: string, question: object, signal: AbortSignal): Promise<Response> {
  const headers = { "content-type": "application/json" };
  return request(path, { method: "POST", headers, body: JSON.stringify(question), signal });
}

/** Fetch; throws `ServerError` for an error response or an unreachable server. */
export async function request(path: string, init: RequestInit = {}): Promise<Response> {
  const response = await fetch(path, init).catch((error: Error) => {
    if (init.signal?.aborted) throw error;
    throw new ServerError(error.message, "offline");
  });
  if (response.ok) return response;
  const body = (await response.json().catch(() => null)) as { error?: ErrorBody } | null;
  throw toError(body?.error ?? {}, response.statusText);
}

interface ErrorBody {
  readonly message?: string;
  readonly code?: string;
}

function toError({ message, code = "", ...facts }: ErrorBody, otherwise: string): ServerError {
  return new ServerError(message ?? otherwise, code, facts);
}
