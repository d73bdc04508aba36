// The page of the next word as `lmhead next --json` would print it, as a table, and as lines to run.

import { pieces, type Model, type Token } from "../ask";
import type { Table } from "../export/csv";
import { modelJson } from "../export/json";
import { commandLine, pyOptions, pyText, speakable } from "../export/quote";
import { py } from "../ui/format";
import type { Lines } from "../ui/export";
import type { Processed, Row, Settings } from "./row";

export interface Shown {
  readonly model: Model;
  /** The text that was typed, and how many words were taken behind it. */
  readonly text: string;
  readonly taken: number;
  readonly prompt: readonly Token[];
  readonly row: Row;
  readonly processed: Processed;
  readonly settings: Settings;
  readonly seed: number;
  readonly top: number;
  /** The place of the word that the sampler draws. */
  readonly drawn: number;
}

const NEUTRAL = { temperature: 1, topK: 0, topP: 1, minP: 0 };
const NAMES = { temperature: "temperature", topK: "top_k", topP: "top_p", minP: "min_p" } as const;
type Stage = keyof typeof NAMES;

// How the library writes a stage with its settings.
const WRITTEN: Record<Stage, (x: number) => string> = {
  temperature: (x) => `Temperature(temperature=${py(x)})`,
  topK: (x) => `TopK(k=${py(x)}, ties='lowest')`,
  topP: (x) => `TopP(min_tokens_to_keep=1, p=${py(x)})`,
  minP: (x) => `MinP(min_tokens_to_keep=1, min_p=${py(x)})`,
};

/** The sampler's options that are not as they are without one; {} for no sampler. */
export function options({ settings, seed }: Pick<Shown, "settings" | "seed">): Record<string, string | number> {
  const stages = Object.entries(NAMES) as [Stage, string][];
  const given = stages.filter(([stage]) => settings[stage] !== NEUTRAL[stage]).map(([stage, name]) => [name, settings[stage]]);
  return given.length ? { ...Object.fromEntries(given), order: settings.order, seed } : {};
}

/** The stages in the order in which they act. */
function active(settings: Settings): Stage[] {
  const cuts: Stage[] = ["topK", "topP", "minP"];
  const all: Stage[] = settings.order === "hf" ? ["temperature", ...cuts] : [...cuts, "temperature"];
  return all.filter((stage) => settings[stage] !== NEUTRAL[stage]);
}

/** What each stage does: the sampler stopped behind it, beside the sampler stopped before it. */
export function steps({ row, settings }: Pick<Shown, "row" | "settings">): Record<string, string | number>[] {
  let before = row.process({ ...NEUTRAL, order: settings.order });
  const step = (stage: string, written: string, after: Processed, cutMass: number): Record<string, string | number> => ({
    stage,
    settings: written,
    words: after.words,
    mass: row.mass[after.words] ?? NaN,
    cut: before.words - after.words,
    cut_mass: cutMass,
    entropy: after.entropy,
    best: row.ids[0] ?? 0,
    best_prob: after.p(0),
  });
  const found = [step("logits", "", before, 0)];
  const stages = active(settings);
  stages.forEach((stage, at) => {
    const on = Object.fromEntries(stages.slice(0, at + 1).map((name) => [name, settings[name]]));
    const after = row.process({ ...NEUTRAL, ...on, order: settings.order });
    let cutMass = 0;
    for (let place = after.words; place < before.words; place++) cutMass += before.p(place);
    found.push(step(NAMES[stage], WRITTEN[stage](settings[stage]), after, cutMass));
    before = after;
  });
  return found;
}

/** Best first, with all figures of a word. */
function ranked({ row, processed, settings, top }: Shown): Record<string, string | number | null>[] {
  const done = steps({ row, settings });
  return Array.from(row.ids.subarray(0, top), (id, rank) => ({
    id,
    logit: row.logits[id] ?? NaN,
    p: row.p(rank),
    processed_p: processed.p(rank),
    log_prob: (row.below[rank] ?? NaN) - row.logSum,
    rank,
    cut_by: rank < processed.words ? null : String(done.find(({ words }) => rank >= Number(words))?.["stage"]),
  }));
}

export async function nextDocument(shown: Shown): Promise<object> {
  const { model, prompt, row, processed, settings, drawn } = shown;
  const words = ranked(shown);
  const texts = await pieces(model.name, [...words.map(({ id }) => Number(id)), row.ids[drawn] ?? 0]);
  const sampler = options(shown);
  return {
    model: modelJson(model),
    prompt,
    vocab_size: row.ids.length,
    entropy: row.entropy,
    mass: row.mass[words.length],
    processed: Object.keys(sampler).length
      ? {
          settings: `Sampler(${pyOptions(sampler, WHOLE).replaceAll('"', "'")})`,
          words: processed.words,
          mass: row.mass[processed.words],
          entropy: processed.entropy,
          steps: steps({ row, settings }),
          token: texts.at(-1),
        }
      : null,
    tokens: words.map((word, at) => ({ ...texts[at], ...word })),
  };
}

const WHOLE = ["top_k", "seed"];

export function nextTables(shown: Shown, say: (id: number) => string, titles: { ranked: string; stages: string }): Table[] {
  const words = ranked(shown);
  const columns = ["rank", "id", "text", "logit", "p", "processed_p", "log_prob", "cut_by"];
  const done = steps(shown);
  const stages = ["stage", "words", "mass", "cut", "cut_mass", "entropy"];
  return [
    { title: titles.ranked, columns, rows: words.map((word) => columns.map((c) => (c === "text" ? say(Number(word["id"])) : word[c]))) },
    { title: titles.stages, columns: stages, rows: done.map((step) => stages.map((column) => step[column])) },
  ];
}

export function nextLines(shown: Shown, where: string, anew: string): Lines {
  const { prompt, text, taken, top } = shown;
  const sampler = options(shown);
  const sampled = Object.keys(sampler).length > 0;
  const said = taken ? spelled(prompt) : text;
  const python = [
    "import lmhead",
    "from lmhead.analysis import next_words",
    "",
    `model = lmhead.open_model(${pyText(where)})`,
    taken ? `prompt = [${prompt.map(({ id }) => id).join(", ")}]` : `prompt = ${pyText(text)}`,
    ...(sampled ? [`sampler = lmhead.Sampler(${pyOptions(sampler, WHOLE)})`] : []),
    `next_words(model, prompt, top=${top}${sampled ? ", sampler=sampler" : ""})`,
  ];
  const words = [`--top ${top}`, ...Object.entries(sampler).map(([name, value]) => `--${name.replaceAll("_", "-")} ${value}`)];
  const usable = said !== undefined && speakable(said);
  return {
    python: python.join("\n"),
    command: usable ? commandLine("next", where, said, words) : undefined,
    note: taken ? anew : undefined,
  };
}

/** The text of tokens; undefined where it is none. */
function spelled(tokens: readonly Token[]): string | undefined {
  const bytes = Uint8Array.from(tokens.flatMap((token) => [...token.bytes]));
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    return undefined;
  }
}
