// A scored text as `lmhead score --json --tokens` prints it, as tables, and as code.

import type { Model } from "../api";
import type { Table } from "../export/csv";
import { modelJson } from "../export/jsonDocument";
import { pyText, shell, fitsShell } from "../export/quote";
import { runnable } from "../export/runnable";
import type { Live } from "../export/live";
import type { Strings } from "../i18n/strings";
import type { CodeLines } from "../ui/exportPanel";
import { everyToken, type Score } from "./score";
import { level, LEVELS, MEASURES, SCALES, type Measure } from "./textMeasures";
import { spell } from "./tokenSpelling";

const LONGEST_ARGUMENT = 100_000; // bytes; Linux allows 131,072 for one argument

export function scoreDocument(model: Model, score: Score): object {
  const { first: _, tokens, ...sums } = score;
  return { model: modelJson(model), tokens, ...sums };
}

/** The text, colored by any measure. */
export function scoreLive(score: Score, by: Measure, s: Strings["text"]): Live {
  const spelled = spell(everyToken(score));
  return {
    kind: "cells",
    title: s.map,
    by,
    choose: s.by,
    point: s.point_only,
    measures: MEASURES.map((measure) => [measure, s.measures[measure]]),
    rows: [
      {
        name: "",
        cells: spelled.map(({ shown, breaks }, at) => {
          const token = score.tokens[at - 1];
          const values = MEASURES.map((measure): [string, number] => {
            if (!token) return ["–", 0];
            const value = SCALES[measure].of(token);
            return [SCALES[measure].show(value), level(measure, value) / (LEVELS - 1)];
          });
          return { text: shown, breaks: Math.min(breaks, 2), values };
        }),
      },
    ],
  };
}

export function scoreTables(score: Score, titles: { tokens: string; sums: string }): Table[] {
  const columns = ["position", "id", "text", "bits", "p", "log_prob", "rank", "entropy", "logit"] as const;
  const { first: _, tokens, ...sums } = score;
  return [
    { title: titles.tokens, columns, rows: tokens.map((token) => columns.map((column) => token[column])) },
    {
      title: titles.sums,
      columns: ["sum", "value"],
      rows: Object.entries(sums).map(([name, value]) => [name, value as number]),
    },
  ];
}

/** Code that scores this text, or the file that it was read from. */
export function scoreLines(where: string, text: string, file: string, beside: string): CodeLines {
  const source = file ? `Path(${pyText(file)}).read_bytes().decode("utf-8")` : pyText(text);
  const python = [
    ...(file ? ["from pathlib import Path", ""] : []),
    "import lmhead",
    "from lmhead.analysis import score",
    "",
    `model = lmhead.open_model(${pyText(where)})`,
    `text = ${source}`,
    "tokens = []",
    "result = score(model, text, on_token=tokens.append)",
    "result.perplexity, result.bits_per_byte",
  ].join("\n");
  return { python: runnable(python), command: command(where, text, file), note: file ? beside : undefined };
}

function command(where: string, text: string, file: string): string | undefined {
  const start = `lmhead score ${shell(where)}`;
  if (file) return `${start} --tokens ${shell(file.startsWith("-") ? `./${file}` : file)}`;
  if (!fitsShell(text)) return undefined;
  if (new TextEncoder().encode(text).length <= LONGEST_ARGUMENT) return `${start} --text=${shell(text)}`;
  return `printf %s ${shell(text)} | ${start} --tokens -`;
}
