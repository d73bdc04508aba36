// The lens as `lmhead lens --json` prints it, as a table, and as code.

import type { Model } from "../api";
import type { Table } from "../export/csv";
import { modelJson } from "../export/jsonDocument";
import { runnable } from "../export/runnable";
import { commandLine, pyText, shell, fitsShell } from "../export/quote";
import type { CodeLines } from "../ui/exportPanel";
import type { Live } from "../export/live";
import type { Strings } from "../i18n/strings";
import { visible } from "../ui/tokenText";
import { layerName } from "./grid";
import { brief, MEASURES, shareOf, textOfToken, valueOf, type Lens, type Measure, type Scale } from "./lensMeasures";
import { TOP } from "./useLens";

export function lensDocument(model: Model, lens: Lens): object {
  const { prompt, targets, layers } = lens;
  return { model: modelJson(model), prompt, targets, layers };
}

/** The grid, colored by any measure. */
export function lensLive(lens: Lens, scale: Scale, by: Measure, s: Strings["lens"]): Live {
  return {
    kind: "cells",
    title: s.grid_title,
    by,
    choose: s.by,
    point: s.point_only,
    measures: MEASURES.map((measure) => [measure, s.measures[measure]]),
    columns: lens.prompt.map((token) => visible(textOfToken(token))),
    rows: lens.layers.map(({ cells }, row) => ({
      name: layerName(row, lens.rows - 1, s),
      cells: cells.map((cell) => ({
        text: visible(textOfToken(cell.best[0])),
        values: MEASURES.map((measure) => {
          const value = valueOf(cell, measure);
          return [brief(value, measure), Math.max(0, shareOf(value, measure, scale))];
        }),
      })),
    })),
  };
}

/** One row per cell. */
export function lensTable(lens: Lens, title: string): Table {
  const columns = ["layer", "position", "read", "target", "best", "best_p", "target_p", "target_rank", "entropy", "kl"];
  const rows = lens.layers.flatMap(({ layer, cells }) =>
    cells.map((cell, at) => [
      layer,
      at,
      lens.prompt[at]?.text,
      lens.targets[at]?.text,
      cell.best[0]?.text,
      cell.best[0]?.p,
      cell.target_p,
      cell.target_rank,
      cell.entropy,
      cell.kl,
    ]),
  );
  return { title, columns, rows };
}

/** `target` is the token for all positions; undefined for the next token of the text. */
export function lensLines(where: string, prompt: string, target: { id: number; text: string } | undefined): CodeLines {
  const python = [
    "import lmhead",
    "from lmhead.analysis import logit_lens",
    "",
    `model = lmhead.open_model(${pyText(where)})`,
    `result = logit_lens(model, ${pyText(prompt)}, top=${TOP}${target ? `, target=${target.id}` : ""})`,
    "for layer, cells in enumerate(result.cells):",
    "    print(layer, [cell.best[0][0].text for cell in cells])",
  ];
  const spelled = !target || (fitsShell(target.text) && !target.text.includes("\ufffd"));
  const options = [`--top ${TOP}`, ...(target ? [`--target=${shell(target.text)}`] : []), "--json"];
  return {
    python: runnable(python.join("\n")),
    command: spelled && fitsShell(prompt) ? commandLine("lens", where, prompt, options) : undefined,
  };
}
