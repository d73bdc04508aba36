// A comparison as `lmhead compare --json` would print it, as tables, and as lines to run.

import type { Model } from "../ask";
import type { Table } from "../export/csv";
import { modelJson } from "../export/json";
import { pyOptions, pyText, shell, speakable } from "../export/quote";
import { samplerText } from "../next/export";
import type { Lines } from "../ui/export";
import type { Distribution, Pair } from "./pair";
import { libraryOptions, type Options } from "./sides";
import type { Along } from "./useCompare";

/** What is compared: two models, or two samplers of the first. */
export interface Sides {
  readonly models: readonly [Model, Model];
  readonly samplers: readonly [Options, Options] | undefined;
}

const WHOLE = ["top_k", "seed"];
// As in the command's document: how many places, and tokens before each.
const [WORST, CONTEXT] = [5, 12];

function written(options: Options): string {
  return `Sampler(${pyOptions({ ...libraryOptions(options), seed: 0 }, WHOLE)})`;
}

function head({ models, samplers }: Sides): object {
  const [a, b] = samplers ?? [];
  return {
    a: modelJson(models[0]),
    b: modelJson(models[1]),
    sampler_a: a ? samplerText(libraryOptions(a), models[0]) : null,
    sampler_b: b ? samplerText(libraryOptions(b), models[1]) : null,
  };
}

/** The places furthest apart, worst first, and the sums over all. */
export function alongDocument(sides: Sides, found: Along): object {
  const { comparable: _, first, places, ...sums } = found;
  const tokens = [first, ...places.map(({ token }) => token)];
  const worst = [...places].sort((x, y) => (y.kl ?? Infinity) - (x.kl ?? Infinity) || x.position - y.position);
  // A long text is read in windows: what stands before one is not seen from within it.
  const window = Math.min(...sides.models.map(({ max_length }) => max_length ?? Infinity));
  const differences = worst.slice(0, WORST).map(({ position, ...place }) => ({
    position,
    before: tokens.slice(Math.max(position - 1 - ((position - 1) % window), position - CONTEXT), position),
    ...place,
  }));
  return { ...head(sides), ...sums, differences };
}

export function alongTable(found: Along, title: string): Table {
  const columns = ["position", "token", "log_prob_a", "log_prob_b", "kl", "total_variation", "best_a", "p_a", "best_b", "p_b"];
  const rows = found.places.map((place) => [
    place.position,
    place.token.text,
    place.log_prob_a,
    place.log_prob_b,
    place.kl,
    place.total_variation,
    place.best_a.text,
    place.best_a.p,
    place.best_b.text,
    place.best_b.p,
  ]);
  return { title, columns, rows };
}

export function alongLines({ models, samplers }: Sides, where: (model: string) => string, text: string): Lines {
  const names = models.map(({ name }) => where(name)) as [string, string];
  const said = `--text=${shell(text)}`;
  if (!samplers) {
    const opened = names.map((name) => `lmhead.open_model(${pyText(name)})`).join(", ");
    return {
      python: lines("from lmhead.analysis import compare_models", `a, b = ${opened}`, `compare_models(a, b, ${pyText(text)})`),
      command: speakable(text) ? `lmhead compare ${names.map(shell).join(" ")} ${said} --json` : undefined,
    };
  }
  const [a, b] = samplers.map((options) => shell(commandOptions(options))) as [string, string];
  return {
    python: lines(
      "from lmhead.analysis import compare_samplers",
      `model = lmhead.open_model(${pyText(names[0])})`,
      ...samplers.map((options, i) => `${i ? "b" : "a"} = lmhead.${written(options)}`),
      `compare_samplers(model, a, b, ${pyText(text)})`,
    ),
    command: speakable(text) ? `lmhead compare ${shell(names[0])} ${said} --sampler-a=${a} --sampler-b=${b} --json` : undefined,
  };
}

/** The next word on both sides: the words that are shown. */
export function promptDocument(sides: Sides, prompt: string, both: Pair, words: readonly object[]): object {
  const { kl, variation, entropyA, entropyB, bestA, bestB } = both;
  return {
    ...head(sides),
    prompt,
    kl,
    total_variation: variation,
    agreement: Number(bestA === bestB),
    entropy_a: entropyA,
    entropy_b: entropyB,
    words,
  };
}

export function wordsShown(ids: readonly number[], a: Distribution, b: Distribution, say: (id: number) => string): { id: number; text: string; p_a: number; p_b: number }[] {
  return ids.map((id) => ({ id, text: say(id), p_a: a[id] ?? NaN, p_b: b[id] ?? NaN }));
}

export function promptTable(words: ReturnType<typeof wordsShown>, title: string): Table {
  return { title, columns: ["id", "text", "p_a", "p_b"], rows: words.map(({ id, text, p_a, p_b }) => [id, text, p_a, p_b]) };
}

/** `lmhead next` for each side. */
export function promptLines({ models, samplers }: Sides, where: (model: string) => string, prompt: string, top: number): Lines {
  const python = [
    ...models.flatMap(({ name }, i) => (i && samplers ? [] : [`${samplers ? "model" : "ab"[i]} = lmhead.open_model(${pyText(where(name))})`])),
    `prompt = ${pyText(prompt)}`,
    ...models.map((_, i) => {
      const options = samplers?.[i];
      return `next_words(${samplers ? "model" : "ab"[i]}, prompt, top=${top}${options ? `, sampler=lmhead.${written(options)}` : ""})`;
    }),
  ];
  const command = models.map(({ name }, i) => {
    const options = samplers?.[i];
    const given = options ? Object.entries({ ...libraryOptions(options), seed: 0 }).map(([key, value]) => `--${key.replaceAll("_", "-")} ${value}`) : [];
    return ["lmhead next", shell(where(name)), `--top ${top}`, ...given, "--", shell(prompt)].join(" ");
  });
  const said = speakable(prompt) && prompt !== "-"; // which would stand for standard input
  return { python: lines("from lmhead.analysis import next_words", ...python), command: said ? command.join("\n") : undefined };
}

function commandOptions(options: Options): string {
  return Object.entries(libraryOptions(options)).map(([name, value]) => `${name}=${value}`).join(" ");
}

function lines(imported: string, ...rest: string[]): string {
  return ["import lmhead", imported, "", ...rest].join("\n");
}
