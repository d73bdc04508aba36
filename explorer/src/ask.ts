// The questions to the server: which models, the text of all tokens, one row of logits.

export interface Model {
  readonly name: string;
  readonly vocab_size: number;
  readonly max_length: number | null;
  readonly text: boolean;
}

export interface Token {
  readonly id: number;
  readonly text: string;
}

export interface Answer {
  readonly prompt: readonly Token[];
  readonly logits: Float32Array;
}

/** What the server said no with. */
export class Refused extends Error {}

export async function models(): Promise<readonly Model[]> {
  return ((await (await asked("/api/models")).json()) as { models: Model[] }).models;
}

export async function vocabulary(model: string): Promise<readonly string[]> {
  const query = new URLSearchParams({ model });
  return (await (await asked(`/api/vocabulary?${query}`)).json()) as string[];
}

export async function next(
  question: { model: string; prompt: string } | { model: string; ids: readonly number[] },
  signal: AbortSignal,
): Promise<Answer> {
  const response = await post("/api/next", question, signal);
  const bytes = await response.arrayBuffer();
  const size = new DataView(bytes).getUint32(0, true);
  const said = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, size))) as { prompt: Token[] };
  return { prompt: said.prompt, logits: new Float32Array(bytes, 4 + size) };
}

/** A question with a body; `Refused` if the server says no. */
export function post(path: string, question: object, signal: AbortSignal): Promise<Response> {
  const headers = { "content-type": "application/json" };
  return asked(path, { method: "POST", headers, body: JSON.stringify(question), signal });
}

async function asked(path: string, init?: RequestInit): Promise<Response> {
  const response = await fetch(path, init);
  if (response.ok) return response;
  const body = (await response.json().catch(() => null)) as { error?: { message?: string } } | null;
  throw new Refused(body?.error?.message ?? response.statusText);
}
