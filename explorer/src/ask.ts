// The questions to the server: which models, the text of all tokens, one row of logits, and how
// each way of choosing would go on.

import { decoded, lengthOf } from "./utf8";

export interface Model {
  readonly name: string;
  /** How it was given to `lmhead explore`: a name or a path that opens it again. */
  readonly given: string;
  readonly vocab_size: number;
  readonly hidden_size: number;
  readonly max_length: number | null;
  /** What ends a text. */
  readonly eos_token_ids: readonly number[];
  readonly text: boolean;
  /** The page's languages that it has words for. */
  readonly speaks: readonly string[];
}

export interface Token {
  readonly id: number;
  readonly text: string;
  readonly bytes: readonly number[];
}

export interface Answer {
  readonly prompt: readonly Token[];
  readonly logits: Float32Array;
}

/** How one way of choosing goes on. */
export interface Path {
  readonly name: "greedy" | "sampler" | "beam";
  readonly tokens: readonly { readonly id: number; readonly log_prob: number; readonly sampler_log_prob: number | null }[];
  readonly log_prob: number;
  /** Whether it came to the end of a text. */
  readonly ended: boolean;
}

/** What the server said no with. */
export class Refused extends Error {
  constructor(
    message: string,
    /** The server's; "offline" where nobody answers, "stopped" where nobody waited. */
    readonly code: string,
    /** The numbers that belong to it. */
    readonly facts: Readonly<Record<string, number>> = {},
  ) {
    super(message);
  }
}

/** The models, and the version of the lmhead that has them. */
export async function models(): Promise<{ readonly lmhead: string; readonly models: readonly Model[] }> {
  return (await (await asked("/api/models")).json()) as { lmhead: string; models: Model[] };
}

/** The text of every token, by id. */
export async function vocabulary(model: string): Promise<readonly string[]> {
  return (await vocabularies(model)).texts;
}

/** The token of an id; its bytes too. */
export async function pieces(model: string, ids: readonly number[]): Promise<readonly Token[]> {
  const { names, odd } = await vocabularies(model);
  return ids.map((id) => {
    const text = names[id] ?? "";
    return { id, text, bytes: odd.get(id) ?? [...new TextEncoder().encode(text)] };
  });
}

interface Vocabulary {
  /** What is no text as a sign that says so. */
  readonly names: readonly string[];
  /** The same, but for parts of characters: see `escaped`. */
  readonly texts: readonly string[];
  /** The bytes of tokens where they are not those of the text. */
  readonly odd: ReadonlyMap<number, readonly number[]>;
}

const asking = new Map<string, Promise<Vocabulary>>();

/** Asked once for each model. */
function vocabularies(model: string): Promise<Vocabulary> {
  const found = asking.get(model);
  if (found) return found;
  const made = asked(`/api/vocabulary?${new URLSearchParams({ model })}`)
    .then((answer) => answer.json() as Promise<(string | [string, number[]])[]>)
    .then((entries) => ({
      names: entries.map((entry) => (typeof entry === "string" ? entry : entry[0])),
      texts: entries.map((entry) => (typeof entry === "string" ? entry : escaped(...entry))),
      odd: new Map(entries.flatMap((entry, id) => (typeof entry === "string" ? [] : [[id, entry[1]] as const]))),
    }));
  made.catch(() => asking.delete(model)); // to be asked again
  asking.set(model, made);
  return made;
}

/** Bytes that are no text as the code points from U+DC80 on: side by side they make characters again. */
function escaped(name: string, bytes: readonly number[]): string {
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

export async function next(
  question: { model: string; more?: readonly number[] } & ({ prompt: string } | { ids: readonly number[] }),
  signal: AbortSignal,
): Promise<Answer> {
  const response = await post("/api/next", question, signal);
  const bytes = await response.arrayBuffer();
  const size = new DataView(bytes).getUint32(0, true);
  const said = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, size))) as { prompt: Token[] };
  return { prompt: said.prompt, logits: new Float32Array(bytes, 4 + size) };
}

/** What is new of the run since the last answer. */
export async function news<T>(last: { end: number; mark: string } | undefined, signal: AbortSignal): Promise<T> {
  const query = last ? `?${new URLSearchParams({ after: String(last.end), mark: last.mark })}` : "";
  return (await (await asked(`/api/run${query}`, { signal })).json()) as T;
}

export async function paths(question: object, signal: AbortSignal): Promise<readonly Path[]> {
  return ((await (await post("/api/paths", question, signal)).json()) as { paths: Path[] }).paths;
}

/** A question with a body; `Refused` if the server says no. */
export function post(path: string, question: object, signal: AbortSignal): Promise<Response> {
  const headers = { "content-type": "application/json" };
  return asked(path, { method: "POST", headers, body: JSON.stringify(question), signal });
}

/** An answer that is not a refusal. */
export async function asked(path: string, init: RequestInit = {}): Promise<Response> {
  const response = await fetch(path, init).catch((error: Error) => {
    if (init.signal?.aborted) throw error;
    throw new Refused(error.message, "offline");
  });
  if (response.ok) return response;
  const body = (await response.json().catch(() => null)) as { error?: { message: string; code: string } } | null;
  const { message = response.statusText, code = "", ...facts } = body?.error ?? {};
  throw new Refused(message, code, facts);
}
