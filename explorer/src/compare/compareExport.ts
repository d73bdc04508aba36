// A comparison as `lmhead compare --json` prints it, as tables, and as code.

import type { Model } from "../api";
import type { Table } from "../export/csv";
import { modelJson } from "../export/jsonDocument";
import { runnable } from "../export/runnable";
import { pyOptions, pyText, shell, fitsShell } from "../export/quote";
import { samplerRepr } from "../next/nextExport";
import { INTEGERS } from "../sampler/code";
import { givenOptions } from "../sampler/options";
import type { SamplerState } from "../sampler/useSampler";
import type { CodeLines } from "../ui/exportPanel";
import type { Distribution, Pair } from "./divergence";
import { libraryOptions } from "./sides";
import type { TextComparison } from "./useCompare";

/** What is compared: two models, or two samplers of the first. */
export interface Sides {
  readonly models: readonly [Model, Model];
  readonly samplers: readonly [SamplerState, SamplerState] | undefined;
}

// As in the command: positions listed, and tokens before each.
const [WORST, CONTEXT] = [5, 12];

function written(sampler: SamplerState): string {
  return `Sampler(${pyOptions({ ...libraryOptions(sampler), seed: 0 }, INTEGERS)})`;
}

/** Both samplers; empty for two models. */
export function sidesText({ samplers }: Sides): string {
  return samplers ? samplers.map((sampler, at) => `${"AB"[at]}: ${written(sampler)}`).join(", ") : "";
}

function head({ models, samplers }: Sides): object {
  const [a, b] = samplers ?? [];
  return {
    a: modelJson(models[0]),
    b: modelJson(models[1]),
    sampler_a: a ? samplerRepr(givenOptions(a.stages), a.orderName ?? "hf", 0, models[0]) : null,
    sampler_b: b ? samplerRepr(givenOptions(b.stages), b.orderName ?? "hf", 0, models[1]) : null,
  };
}

/** The positions with the largest differences, and totals. */
export function textDocument(sides: Sides, found: TextComparison): object {
  const { comparable: _, first, places, ...sums } = found;
  const tokens = [first, ...places.map(({ token }) => token)];
  const worst = [...places].sort((x, y) => (y.kl ?? Infinity) - (x.kl ?? Infinity) || x.position - y.position);
  // A long text is read in windows; the context does not reach across their starts.
  const window = Math.min(...sides.models.map(({ max_length }) => max_length ?? Infinity));
  const differences = worst.slice(0, WORST).map(({ position, ...place }) => ({
    position,
    before: tokens.slice(Math.max(position - 1 - ((position - 1) % window), position - CONTEXT), position),
    ...place,
  }));
  return { ...head(sides), ...sums, differences };
}

export function textTable(found: TextComparison, title: string): Table {
  const columns = [
    "position",
    "token",
    "log_prob_a",
    "log_prob_b",
    "kl",
    "total_variation",
    "best_a",
    "p_a",
    "best_b",
    "p_b",
  ];
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

const TOTALS = "result.kl, result.total_variation, result.agreement, result.perplexity";

export function textLines({ models, samplers }: Sides, where: (model: string) => string, text: string): CodeLines {
  const names = models.map(({ name }) => where(name)) as [string, string];
  const textOption = `--text=${shell(text)}`;
  if (!samplers) {
    const opened = names.map((name) => `lmhead.open_model(${pyText(name)})`).join(", ");
    return {
      python: lines(
        "from lmhead.analysis import compare_models",
        `a, b = ${opened}`,
        `result = compare_models(a, b, ${pyText(text)})`,
        TOTALS,
      ),
      command: fitsShell(text) ? `lmhead compare ${names.map(shell).join(" ")} ${textOption} --json` : undefined,
    };
  }
  const [a, b] = samplers.map((options) => shell(commandOptions(options))) as [string, string];
  return {
    python: lines(
      "from lmhead.analysis import compare_samplers",
      `model = lmhead.open_model(${pyText(names[0])})`,
      ...samplers.map((options, i) => `${i ? "b" : "a"} = lmhead.${written(options)}`),
      `result = compare_samplers(model, a, b, ${pyText(text)})`,
      TOTALS,
    ),
    command: fitsShell(text)
      ? `lmhead compare ${shell(names[0])} ${textOption} --sampler-a=${a} --sampler-b=${b} --json`
      : undefined,
  };
}

/** The next token on both sides. */
export function promptDocument(sides: Sides, prompt: string, both: Pair, tokens: readonly object[]): object {
  const { kl, variation, entropyA, entropyB, bestA, bestB } = both;
  return {
    ...head(sides),
    prompt,
    kl,
    total_variation: variation,
    agreement: Number(bestA === bestB),
    entropy_a: entropyA,
    entropy_b: entropyB,
    tokens,
  };
}

export function tokensShown(
  ids: readonly number[],
  a: Distribution,
  b: Distribution,
  tokenText: (id: number) => string,
): { id: number; text: string; p_a: number; p_b: number }[] {
  return ids.map((id) => ({ id, text: tokenText(id), p_a: a[id] ?? NaN, p_b: b[id] ?? NaN }));
}

export function promptTable(tokens: ReturnType<typeof tokensShown>, title: string): Table {
  return {
    title,
    columns: ["id", "text", "p_a", "p_b"],
    rows: tokens.map(({ id, text, p_a, p_b }) => [id, text, p_a, p_b]),
  };
}

/** `lmhead next` for each side. */
export function promptLines(
  { models, samplers }: Sides,
  where: (model: string) => string,
  prompt: string,
  top: number,
): CodeLines {
  const python = [
    ...models.flatMap(({ name }, i) =>
      i && samplers ? [] : [`${samplers ? "model" : "ab"[i]} = lmhead.open_model(${pyText(where(name))})`],
    ),
    `prompt = ${pyText(prompt)}`,
    ...models.map((_, i) => {
      const options = samplers?.[i];
      return `result_${"ab"[i]} = next_tokens(${samplers ? "model" : "ab"[i]}, prompt, top=${top}${options ? `, sampler=lmhead.${written(options)}` : ""})`;
    }),
    "for token in [*result_a.tokens, *result_b.tokens]:",
    "    print(token.rank, repr(token.piece.text), token.p, token.processed_p)",
  ];
  const command = models.map(({ name }, i) => {
    const options = samplers?.[i];
    const given = options
      ? Object.entries({ ...libraryOptions(options), seed: 0 }).map(
          ([key, value]) => `--${key.replaceAll("_", "-")} ${value}`,
        )
      : [];
    return ["lmhead next", shell(where(name)), `--top ${top}`, ...given, "--", shell(prompt)].join(" ");
  });
  const usable = fitsShell(prompt) && prompt !== "-"; // "-" means standard input
  return {
    python: lines("from lmhead.analysis import next_tokens", ...python),
    command: usable ? command.join("\n") : undefined,
  };
}

function commandOptions(sampler: SamplerState): string {
  return Object.entries(libraryOptions(sampler))
    .map(([name, value]) => `${name}=${value}`)
    .join(" ");
}

function lines(imported: string, ...rest: string[]): string {
  return runnable(["import lmhead", imported, "", ...rest].join("\n"));
}
