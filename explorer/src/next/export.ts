// The page of the next word as `lmhead next --json` would print it, as a table, and as lines to run.

import { pieces, type Model, type Token } from "../ask";
import type { Table } from "../export/csv";
import { modelJson } from "../export/json";
import { commandLine, pyOptions, pyText, speakable } from "../export/quote";
import { textOf } from "../text/spell";
import { py } from "../ui/format";
import type { Lines } from "../ui/export";
import { shownPlaces } from "./ranked";
import type { Processed, Row, Said, Settings, StageName, Whose } from "./row";

type Set = Required<Settings>;

export interface Shown {
  readonly model: Model;
  /** The text that was typed. */
  readonly text: string;
  /** The tokens of that, and those that were taken behind it. */
  readonly said: Said;
  readonly prompt: readonly Token[];
  readonly row: Row;
  readonly processed: Processed;
  readonly settings: Set;
  readonly seed: number;
  readonly top: number;
  /** The place of the word that the sampler draws. */
  readonly drawn: number;
}

// The sampler's options by the library's names, and what each is where it does nothing.
const OPTIONS: Record<Exclude<keyof Set, "order">, readonly [string, number]> = {
  temperature: ["temperature", 1],
  topK: ["top_k", 0],
  topP: ["top_p", 1],
  minP: ["min_p", 0],
  typicalP: ["typical_p", 1],
  repetition: ["repetition_penalty", 1],
  frequency: ["frequency_penalty", 0],
  presence: ["presence_penalty", 0],
};

const WHOLE = ["top_k", "seed"]; // the options that are whole numbers

const LAST: Record<Whose, string> = { hf: "None", "llama.cpp": "64" };
const COUNTED: Record<Whose, string> = { hf: "output", "llama.cpp": "context" };

// How the library writes a stage with its settings.
const WRITTEN: Record<StageName, (s: Set) => string> = {
  temperature: (s) => `Temperature(temperature=${py(s.temperature)})`,
  top_k: (s) => `TopK(k=${py(s.topK)}, ties='lowest')`,
  top_p: (s) => `TopP(min_tokens_to_keep=1, p=${py(s.topP)})`,
  min_p: (s) => `MinP(min_tokens_to_keep=1, min_p=${py(s.minP)})`,
  typical_p: (s) => `Typical(min_tokens_to_keep=1, mass=${py(s.typicalP)})`,
  repetition_penalty: (s) =>
    `RepetitionPenalty(penalty=${py(s.repetition)}, counted='context', last_n=${LAST[s.order]})`,
  frequency_penalty: (s) =>
    `CountPenalty(frequency=${py(s.frequency)}, presence=${py(s.presence)}, counted='${COUNTED[s.order]}', last_n=${LAST[s.order]})`,
};

/** The sampler's options that are not as they are without one; {} for no sampler. */
export function options({ settings, seed }: Pick<Shown, "settings" | "seed">): Record<string, string | number> {
  const given = Object.entries(OPTIONS).flatMap(([key, [name, neutral]]) => {
    const value = settings[key as keyof typeof OPTIONS];
    return value === neutral ? [] : [[name, value] as const];
  });
  return given.length ? { ...Object.fromEntries(given), order: settings.order, seed } : {};
}

/** What each stage does. */
export function steps({ row, processed, settings }: Pick<Shown, "row" | "processed" | "settings">): Record<string, string | number>[] {
  const words = row.order.words;
  const none = { cut: 0, cut_mass: 0 };
  const first = { words, mass: 1, ...none, entropy: row.entropy, best: row.ids[0] ?? 0, best_prob: row.p(0) };
  const found: Record<string, string | number>[] = [{ stage: "logits", settings: "", ...first }];
  processed.cuts.forEach((cut, at) => {
    const before = processed.cuts[at - 1];
    const gone = (before?.left ?? words) - cut.left;
    found.push({
      stage: cut.name,
      settings: WRITTEN[cut.name](settings),
      words: cut.left,
      mass: cut.mass,
      cut: gone,
      cut_mass: gone ? 1 - (before ? before.share(cut.kept) : cut.mass) : 0,
      entropy: cut.entropy,
      best: cut.best,
      best_prob: cut.bestP,
    });
  });
  return found;
}

/** How the library writes a sampler; the ids that end a text are the model's. */
export function samplerText({ order = "hf", seed = 0, ...given }: Record<string, string | number>, model: Model): string {
  const ends = model.eos_token_ids.length ? `eos_token_id=[${model.eos_token_ids.join(", ")}], ` : "";
  const own = Object.keys(given).length ? `${pyOptions(given, WHOLE)}, ` : "";
  return `Sampler(${own}${ends}order='${order}', seed=${seed})`;
}

interface Word {
  readonly id: number;
  readonly logit: number;
  readonly p: number;
  readonly processed_p: number;
  readonly log_prob: number;
  readonly rank: number;
  readonly cut_by: StageName | null;
}

/** The words that are shown, best first, with all figures of each. */
function ranked({ row, processed, top }: Shown): Word[] {
  return shownPlaces(row, processed, top).map((rank) => {
    const id = row.ids[rank] ?? 0;
    return {
      id,
      logit: row.logits[id] ?? NaN,
      p: row.p(rank),
      processed_p: processed.p(rank),
      log_prob: row.logP(rank),
      rank,
      cut_by: processed.cutBy(rank) ?? null,
    };
  });
}

export async function nextDocument(shown: Shown): Promise<object> {
  const { model, prompt, row, processed, drawn } = shown;
  const words = ranked(shown);
  const texts = await pieces(model.name, [...words.map(({ id }) => id), row.ids[drawn] ?? 0]);
  const sampler = options(shown);
  return {
    model: modelJson(model),
    prompt,
    vocab_size: row.ids.length,
    entropy: row.entropy,
    mass: Math.min(1, words.reduce((sum, { p }) => sum + p, 0)),
    processed: Object.keys(sampler).length
      ? {
          settings: samplerText(sampler, model),
          words: processed.words,
          mass: processed.cuts.at(-1)?.mass ?? 1,
          entropy: processed.entropy,
          steps: steps(shown),
          token: texts.at(-1),
        }
      : null,
    tokens: words.map((word, at) => ({ ...texts[at], ...word })),
  };
}

export function nextTables(shown: Shown, say: (id: number) => string, titles: { ranked: string; stages: string }): Table[] {
  const words = ranked(shown);
  const columns = ["rank", "id", "text", "logit", "p", "processed_p", "log_prob", "cut_by"] as const;
  const done = steps(shown);
  const stages = ["stage", "words", "mass", "cut", "cut_mass", "entropy"];
  return [
    { title: titles.ranked, columns, rows: words.map((word) => columns.map((c) => (c === "text" ? say(word.id) : word[c]))) },
    { title: titles.stages, columns: stages, rows: done.map((step) => stages.map((column) => step[column])) },
  ];
}

export function nextLines(shown: Shown, where: string, anew: string): Lines {
  const { prompt, text, said: { output }, top } = shown;
  const taken = output.length > 0;
  const sampler = options(shown);
  const sampled = Object.keys(sampler).length > 0;
  const said = taken ? textOf(prompt) : text;
  // Hugging Face's penalties by count look at what came behind the prompt.
  const behind = taken && ("frequency_penalty" in sampler || "presence_penalty" in sampler) ? prompt.length - output.length : undefined;
  const python = [
    "import lmhead",
    "from lmhead.analysis import next_words",
    "",
    `model = lmhead.open_model(${pyText(where)})`,
    taken ? `prompt = [${prompt.map(({ id }) => id).join(", ")}]` : `prompt = ${pyText(text)}`,
    ...(sampled ? [`sampler = lmhead.Sampler(${pyOptions(sampler, WHOLE)})`] : []),
    `next_words(model, prompt, top=${top}${sampled ? ", sampler=sampler" : ""}${behind === undefined ? "" : `, prompt_length=${behind}`})`,
  ];
  const words = [`--top ${top}`, ...(behind === undefined ? [] : [`--prompt-length ${behind}`]), ...Object.entries(sampler).map(([name, value]) => `--${name.replaceAll("_", "-")} ${value}`)];
  const usable = said !== undefined && speakable(said);
  return {
    python: python.join("\n"),
    command: usable ? commandLine("next", where, said, words) : undefined,
    note: taken ? anew : undefined,
  };
}
