// The ranked words: logit, the model's p, the sampler's p; a click goes on with a word.

import type { JSX } from "preact";
import { fill, useStrings } from "../i18n";
import { fixed } from "../ui/format";
import type { Processed, Row } from "./row";
import { TokenText, visible } from "./tokens";

interface RankedProps {
  readonly row: Row;
  readonly processed: Processed;
  readonly top: number;
  say(id: number): string;
  onTake(id: number): void;
}

export function Ranked({ row, processed, top, say, onTake }: RankedProps): JSX.Element {
  const { next: s, common } = useStrings();
  const places = Array.from({ length: Math.min(top, row.ids.length) }, (_, place) => place);
  const most = Math.max(row.p(0), processed.p(0));
  return (
    <table class="bars ranked" data-chart="ranked">
      <caption>{s.ranked}</caption>
      <thead>
        <tr>
          <th scope="col">{common.word}</th>
          <th scope="col" class="figure">{s.id}</th>
          <th scope="col" class="figure">{common.logit}</th>
          <th scope="col" class="figure">{s.raw}</th>
          <th scope="col" class="figure">{s.processed}</th>
          <td class="bar" />
        </tr>
      </thead>
      <tbody>
        {places.map((place) => {
          const id = row.ids[place] ?? 0;
          const [raw, left] = [row.p(place), processed.p(place)];
          return (
            <tr key={id} class={place < processed.words ? undefined : "dead"} data-id={id} data-p={raw} data-processed={left}>
              <th scope="row">
                <button type="button" class="word" aria-label={fill(s.continue, { word: visible(say(id)) })} onClick={() => onTake(id)}>
                  <TokenText text={say(id)} />
                </button>
              </th>
              <td class="figure">{id}</td>
              <td class="figure">{fixed(row.logits[id] ?? NaN, 3)}</td>
              <td class="figure">{chance(raw)}</td>
              <td class="figure">{place < processed.words ? chance(left) : "—"}</td>
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
