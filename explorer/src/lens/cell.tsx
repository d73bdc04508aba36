// The selected cell: its measures, its top tokens, and the curve over the layers.

import type { JSX } from "preact";
import { fill, useStrings } from "../i18n/strings";
import { chance } from "../next/rankedTokens";
import { Track } from "../ui/bars";
import { TokenText, visible } from "../ui/tokenText";
import { LayerCurve } from "./layerCurve";
import { layerName, type At } from "./grid";
import { exact, MEASURES, textOfToken, valueOf, type Lens, type Measure, type Scale } from "./lensMeasures";
import { Heads } from "../ui/factsTable";

interface CellProps {
  readonly lens: Lens;
  readonly scale: Scale;
  readonly measure: Measure;
  readonly at: At;
  onTarget(id: number): void;
}

export function CellPanel({ lens, scale, measure, at: [row, column], onTarget }: CellProps): JSX.Element | null {
  const { lens: s, common } = useStrings();
  const cell = lens.layers[row]?.cells[column];
  const target = lens.targets[column];
  if (!cell || !target) return null;
  return (
    <aside class="panel cell" data-chart="cell" data-at={`${row}.${column}`} aria-label={s.chosen} aria-live="polite">
      <h2>{layerName(row, lens.rows - 1, s)}</h2>
      <p class="note">
        {s.behind} <TokenText text={textOfToken(lens.prompt[column])} /> · {s.target}{" "}
        <TokenText text={textOfToken(target)} />
      </p>
      <table class="bars" data-chart="best">
        <caption>{s.best}</caption>
        <Heads of={[common.token, [common.probability, "figure"]]} bar />
        <tbody>
          {cell.best.map((token) => (
            <tr key={token.id} class={token.id === target.id ? "hit" : undefined} data-id={token.id} data-p={token.p}>
              <th scope="row">
                <button
                  type="button"
                  class="token-button"
                  aria-label={fill(s.set_target, { token: visible(textOfToken(token)) })}
                  onClick={() => onTarget(token.id)}
                >
                  <TokenText text={textOfToken(token)} />
                </button>
              </th>
              <td class="figure">{chance(token.p)}</td>
              <td class="bar">
                <Track share={token.p} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
      <p class="note">{s.seekHint}</p>
      <table class="facts" data-chart="facts">
        <tbody>
          {MEASURES.map((one) => (
            <tr key={one} data-measure={one} data-value={valueOf(cell, one)}>
              <th scope="row">{s.measures[one]}</th>
              <td>
                {exact(valueOf(cell, one), one)}
                {one in s.units ? ` ${s.units[one as keyof typeof s.units]}` : ""}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
      <LayerCurve lens={lens} scale={scale} measure={measure} at={[row, column]} />
    </aside>
  );
}
