// The ranked tokens: logit, the model's p, the sampler's p or the stage that removed it; a click continues.
//
// As in `lmhead next`: the model's best tokens and the sampler's best tokens, by the model's rank.

import type { JSX } from "preact";
import { useRef } from "preact/hooks";
import { fill, useStrings } from "../i18n/strings";
import { useKeptFocus } from "../ui/useKeptFocus";
import { fixed, grouped } from "../ui/format";
import type { Processed } from "../sampler/process";
import type { Row } from "../sampler/row";
import { Track } from "../ui/bars";
import { TokenText, visible } from "../ui/tokenText";
import { Heads } from "../ui/factsTable";

interface RankedProps {
  readonly row: Row;
  readonly processed: Processed;
  /** Ranks of the model, from 0. */
  readonly ranks: readonly number[];
  readonly scale: BarScale;
  tokenText(id: number): string;
  onTake(id: number): void;
}

export type BarScale = "linear" | "log";

const DECADES = 6; // of the log scale

/** The width of a bar, from 0 to 1: by p itself, or by its logarithm from 1e-6 to 1. */
export function barWidth(p: number, scale: BarScale): number {
  return scale === "linear" ? p : p > 0 ? Math.max(0, 1 + Math.log10(p) / DECADES) : 0;
}

/** The ranks of the best tokens of model and sampler. */
export function shownRanks(row: Row, processed: Processed, top: number): number[] {
  const best = Array.from({ length: Math.min(top, row.ids.length) }, (_, rank) => rank);
  return [...new Set([...best, ...processed.best(top)])].sort((a, b) => a - b);
}

export function Ranked({ row, processed, ranks, scale, tokenText, onTake }: RankedProps): JSX.Element {
  const { next: s, common, sampler: t } = useStrings();
  const table = useRef<HTMLTableElement>(null);
  useKeptFocus(table, () => ["tbody tr:last-child button"]);
  return (
    <table ref={table} class="bars ranked" data-chart="ranked">
      <caption>
        {s.ranked}
        <span class="key" aria-hidden="true">
          <span>
            <i class="of-bar">▬</i> {s.processed}
          </span>
          <span>
            <i class="of-mark">┃</i> {s.raw}
          </span>
        </span>
      </caption>
      <Heads
        of={[
          [s.rank, "figure rank"],
          common.token,
          [s.id, "figure id"],
          [common.logit, "figure logit"],
          [s.raw, "figure"],
          [s.processed, "figure"],
        ]}
        bar
      />
      <tbody>
        {ranks.map((rank, at) => {
          const id = row.ids[rank] ?? 0;
          const [raw, left] = [row.p(rank), processed.p(rank)];
          const cut = processed.removedAt(rank)?.name;
          return (
            // The key is the place in the list, so that keyboard focus stays at the same rank after a step.
            <tr
              key={at}
              class={cut ? "dead" : undefined}
              data-id={id}
              data-p={raw}
              data-processed={left}
              data-cut={cut ?? ""}
            >
              <td class="figure rank">{grouped(rank + 1)}</td>
              <th scope="row">
                <button
                  type="button"
                  class="token-button"
                  aria-label={fill(s.continue, { token: visible(tokenText(id)) })}
                  onClick={() => onTake(id)}
                >
                  <TokenText text={tokenText(id)} />
                </button>
              </th>
              <td class="figure id">{id}</td>
              <td class="figure logit">{fixed(row.logits[id] ?? NaN, 3)}</td>
              <td class="figure">{chance(raw)}</td>
              <td class="figure">
                {cut ? <small title={fill(s.cut_by, { stage: t.stages[cut] })}>{t.stages[cut]}</small> : chance(left)}
              </td>
              <td class="bar">
                <Track share={barWidth(left, scale)} mark={barWidth(raw, scale)} />
              </td>
            </tr>
          );
        })}
      </tbody>
    </table>
  );
}

/** Four decimals, or an exponent for small probabilities. */
export function chance(p: number): string {
  if (p === 0) return "0";
  return p >= 0.0005 ? fixed(p, 4) : p.toExponential(1).replace("-", "−");
}
