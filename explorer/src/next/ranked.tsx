// The ranked words: logit, the model's p, the sampler's p or what struck it out; a click goes on.
//
// As in `lmhead next`: the model's best words, and the sampler's own best ones, each in its place.

import type { JSX } from "preact";
import { useRef } from "preact/hooks";
import { fill, useStrings } from "../i18n";
import { useKeptFocus } from "../ui/focus";
import { fixed, whole } from "../ui/format";
import type { Processed, Row } from "./row";
import { TokenText, visible } from "./tokens";

interface RankedProps {
  readonly row: Row;
  readonly processed: Processed;
  /** Places in the model's ranking. */
  readonly places: readonly number[];
  say(id: number): string;
  onTake(id: number): void;
}

/** Those of the best words of model and sampler. */
export function shownPlaces(row: Row, processed: Processed, top: number): number[] {
  const best = Array.from({ length: Math.min(top, row.ids.length) }, (_, place) => place);
  return [...new Set([...best, ...processed.best(top)])].sort((a, b) => a - b);
}

export function Ranked({ row, processed, places, say, onTake }: RankedProps): JSX.Element {
  const { next: s, common } = useStrings();
  const table = useRef<HTMLTableElement>(null);
  useKeptFocus(table, () => ["tbody tr:last-child button"]);
  const most = Math.max(row.p(0), ...places.map((place) => processed.p(place)));
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
      <thead>
        <tr>
          <th scope="col" class="figure rank">{s.rank}</th>
          <th scope="col">{common.word}</th>
          <th scope="col" class="figure id">{s.id}</th>
          <th scope="col" class="figure">{common.logit}</th>
          <th scope="col" class="figure">{s.raw}</th>
          <th scope="col" class="figure">{s.processed}</th>
          <td class="bar" />
        </tr>
      </thead>
      <tbody>
        {places.map((place, at) => {
          const id = row.ids[place] ?? 0;
          const [raw, left] = [row.p(place), processed.p(place)];
          const cut = processed.cutBy(place);
          return (
            // By place, not by word: who takes words by keyboard stays at the rank where they are.
            <tr key={at} class={cut ? "dead" : undefined} data-id={id} data-p={raw} data-processed={left} data-cut={cut ?? ""}>
              <td class="figure rank">{whole(place + 1)}</td>
              <th scope="row">
                <button type="button" class="word" aria-label={fill(s.continue, { word: visible(say(id)) })} onClick={() => onTake(id)}>
                  <TokenText text={say(id)} />
                </button>
              </th>
              <td class="figure id">{id}</td>
              <td class="figure">{fixed(row.logits[id] ?? NaN, 3)}</td>
              <td class="figure">{chance(raw)}</td>
              <td class="figure">{cut ? <small title={fill(s.cut_by, { stage: s[cut] })}>{s[cut]}</small> : chance(left)}</td>
              <td class="bar">
                <div class="track" aria-hidden="true">
                  <div class="fill plain" style={{ left: "0", width: `${(100 * left) / most}%` }} />
                  <div class="mark" style={{ left: `${(100 * raw) / most}%` }} />
                </div>
              </td>
            </tr>
          );
        })}
      </tbody>
    </table>
  );
}

/** Four digits, or a power of ten where they would be zeros. */
export function chance(p: number): string {
  if (p === 0) return "0";
  return p >= 0.0005 ? fixed(p, 4) : p.toExponential(1).replace("-", "−");
}
