// The page as `lmhead next --json` prints it, as tables, and as code.

import { escaped, fetchTokens, type Model, type Token } from "../api";
import type { Table } from "../export/csv";
import { base64, type Live } from "../export/live";
import { modelJson } from "../export/jsonDocument";
import { runnable } from "../export/runnable";
import { commandLine, pyOptions, pyText, fitsShell } from "../export/quote";
import { commandOptions, INTEGERS, pythonSampler, stageRepr, type Chain } from "../sampler/code";
import { givenOptions, orderName } from "../sampler/options";
import type { Context, Counting } from "../sampler/penalties";
import type { Processed } from "../sampler/process";
import type { Row } from "../sampler/row";
import { textOf } from "../text/tokenSpelling";
import type { Strings } from "../i18n/strings";
import type { CodeLines } from "../ui/exportPanel";
import { joined, visible } from "../ui/tokenText";
import { shownRanks } from "./rankedTokens";

const LIVE_TOKENS = 20; // in the interactive part of a report

export interface Shown {
  readonly model: Model;
  /** The prompt as it was typed. */
  readonly text: string;
  readonly context: Context;
  /** The tokens of prompt and output. */
  readonly prompt: readonly Token[];
  readonly row: Row;
  readonly processed: Processed;
  readonly chain: Chain;
  readonly counting: Counting;
  readonly top: number;
  /** The model's rank of the token that the sampler draws. */
  readonly drawn: number;
}

/** What each stage does, as in `Sampler.explain`. */
export function explained({
  row,
  processed,
  chain,
  counting,
}: Pick<Shown, "row" | "processed" | "chain" | "counting">): Record<string, string | number>[] {
  const first = {
    kept: row.candidates.size,
    mass: 1,
    cut: 0,
    cut_mass: 0,
    entropy: row.entropy,
    best: row.ids[0] ?? 0,
    best_prob: row.p(0),
    words: row.candidates.size, // the former name of kept
  };
  return [
    { stage: "logits", settings: "", ...first },
    ...processed.steps.map((step) => {
      const stage = chain.stages.find(({ name }) => name === step.stage);
      return {
        stage: step.name,
        settings: stage ? stageRepr(stage, counting) : "",
        kept: step.left,
        mass: step.mass,
        cut: step.removed,
        cut_mass: step.removedMass,
        entropy: step.entropy,
        best: step.best,
        best_prob: step.bestP,
        words: step.left,
      };
    }),
  ];
}

/** How the library writes a sampler; the ids that end a text are the model's. */
export function samplerRepr(
  options: Readonly<Record<string, number>>,
  order: string,
  seed: number,
  model: Model,
): string {
  const ends = model.eos_token_ids.length ? `eos_token_id=[${model.eos_token_ids.join(", ")}], ` : "";
  const own = Object.keys(options).length ? `${pyOptions(options, INTEGERS)}, ` : "";
  return `Sampler(${own}${ends}order='${order}', seed=${seed})`;
}

/** Prompt and generated tokens as text. */
export function promptText({ text, prompt, context }: Shown): string {
  const generated = prompt.slice(context.prompt.length);
  return text + joined(generated.map((token) => escaped(token.text, token.bytes)));
}

/** The options of the sampler by their names; empty if no stage is active. */
export function samplerText({ chain }: Shown): string {
  if (!chain.stages.length) return "";
  const order = orderName(chain.order) ?? chain.stages.map(({ name }) => name).join(" > ");
  return Object.entries({ ...givenOptions(chain.stages), order, seed: chain.seed })
    .map(([name, value]) => `${name}=${value}`)
    .join(", ");
}

interface RankedToken {
  readonly id: number;
  readonly logit: number;
  readonly p: number;
  readonly processed_p: number;
  readonly log_prob: number;
  /** From 0. */
  readonly rank: number;
  readonly cut_by: string | null;
}

function rankedTokens({ row, processed, top }: Shown): RankedToken[] {
  return shownRanks(row, processed, top).map((rank) => {
    const id = row.ids[rank] ?? 0;
    return {
      id,
      logit: row.logits[id] ?? NaN,
      p: row.p(rank),
      processed_p: processed.p(rank),
      log_prob: row.logP(rank),
      rank,
      cut_by: processed.removedAt(rank)?.name ?? null,
    };
  });
}

/** The best tokens with sliders. */
export function nextLive({ row, chain }: Shown, tokenText: (id: number) => string, strings: Strings): Live {
  const { next: s, sampler: t, common } = strings;
  const set = givenOptions(chain.stages);
  return {
    kind: "distribution",
    title: s.ranked,
    labels: {
      temperature: t.stages.temperature,
      top_k: t.stages.top_k,
      top_p: t.stages.top_p,
      min_p: t.stages.min_p,
      token: common.token,
      raw: s.raw,
      processed: s.processed,
    },
    values: {
      temperature: set["temperature"] ?? 1,
      top_k: set["top_k"] ?? 0,
      top_p: set["top_p"] ?? 1,
      min_p: set["min_p"] ?? 0,
    },
    tokens: Array.from(row.ids.slice(0, LIVE_TOKENS), (id) => visible(tokenText(id))),
    logits: base64(Float32Array.from(row.ids, (id) => row.logits[id] ?? 0)),
  };
}

export async function nextDocument(shown: Shown): Promise<object> {
  const { model, prompt, row, processed, chain, drawn } = shown;
  const tokens = rankedTokens(shown);
  const texts = await fetchTokens(model.name, [...tokens.map(({ id }) => id), row.ids[drawn] ?? 0]);
  const order = orderName(chain.order);
  return {
    model: modelJson(model),
    prompt,
    vocab_size: row.ids.length,
    entropy: row.entropy,
    mass: Math.min(
      1,
      tokens.reduce((sum, { p }) => sum + p, 0),
    ),
    processed: chain.stages.length
      ? {
          settings: samplerRepr(order ? givenOptions(chain.stages) : {}, order ?? "hf", chain.seed, model),
          kept: processed.kept,
          words: processed.kept,
          mass: processed.steps.at(-1)?.mass ?? 1,
          entropy: processed.entropy,
          steps: explained(shown),
          token: texts.at(-1),
        }
      : null,
    tokens: tokens.map((token, at) => ({ ...texts[at], ...token })),
  };
}

export function nextTables(
  shown: Shown,
  tokenText: (id: number) => string,
  titles: { ranked: string; stages: string },
): Table[] {
  const columns = ["rank", "id", "text", "logit", "p", "processed_p", "log_prob", "cut_by"] as const;
  const stages = ["stage", "kept", "mass", "cut", "cut_mass", "entropy"];
  return [
    {
      title: titles.ranked,
      columns,
      rows: rankedTokens(shown).map((token) => columns.map((c) => (c === "text" ? tokenText(token.id) : token[c]))),
    },
    {
      title: titles.stages,
      columns: stages,
      rows: explained(shown).map((step) => stages.map((column) => step[column])),
    },
  ];
}

export function nextLines(shown: Shown, where: string, note: string): CodeLines {
  const { prompt, text, context, top, chain } = shown;
  const generated = context.output.length > 0;
  const sampled = chain.stages.length > 0;
  const sampler = pythonSampler(chain);
  const plain = generated ? textOf(prompt) : text;
  // Hugging Face's frequency and presence penalties count generated tokens only.
  const counts = chain.stages.some(({ name }) => name === "frequency_penalty");
  const length = generated && counts ? context.prompt.length : undefined;
  const python = [
    "import lmhead",
    "from lmhead.analysis import next_tokens",
    ...(sampled ? sampler.imports : []),
    "",
    `model = lmhead.open_model(${pyText(where)})`,
    generated ? `prompt = [${prompt.map(({ id }) => id).join(", ")}]` : `prompt = ${pyText(text)}`,
    ...(sampled ? [`sampler = ${sampler.expression}`] : []),
    `result = next_tokens(model, prompt, top=${top}${sampled ? ", sampler=sampler" : ""}${length === undefined ? "" : `, prompt_length=${length}`})`,
    "for token in result.tokens:",
    "    print(token.rank, repr(token.piece.text), token.p, token.processed_p)",
  ];
  const options = sampled ? commandOptions(chain) : [];
  const given = [`--top ${top}`, ...(length === undefined ? [] : [`--prompt-length ${length}`]), ...(options ?? [])];
  const usable = plain !== undefined && fitsShell(plain) && options !== undefined;
  return {
    python: runnable(python.join("\n")),
    command: usable ? commandLine("next", where, plain, given) : undefined,
    note: generated ? note : undefined,
  };
}
