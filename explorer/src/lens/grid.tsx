// Layers from top to bottom, positions from left to right; each cell has the top token and a number.
//
// One cell is in the tab order; arrow keys, Home and End move, Enter or a click selects.

import type { JSX } from "preact";
import { useEffect, useMemo, useRef } from "preact/hooks";
import { Tooltip } from "../heat/tooltip";
import { shade } from "../heat/color";
import { fill, useStrings, type Strings } from "../i18n/strings";
import { TokenText, visible } from "../ui/tokenText";
import {
  brief,
  exact,
  MEASURES,
  shareOf,
  textOfToken,
  valueOf,
  type Lens,
  type Measure,
  type Scale,
} from "./lensMeasures";

/** A cell of the grid: layer and position, both from 0. */
export type At = readonly [number, number];

interface GridProps {
  readonly lens: Lens;
  readonly scale: Scale;
  readonly measure: Measure;
  readonly figures: boolean;
  readonly chosen: At;
  /** Whether the user selected it. */
  readonly picked: boolean;
  onChoose(at: At): void;
}

export function Grid({ lens, scale, measure, figures, chosen, picked, onChoose }: GridProps): JSX.Element {
  const { lens: s } = useStrings();
  const box = useRef<HTMLDivElement>(null);
  const last = lens.rows - 1;
  const [layer, position] = chosen;

  const choose = (event: Event): void => {
    const at = placeOf(event.target);
    if (at) onChoose(at);
  };
  const move = (event: KeyboardEvent): void => {
    const at = placeOf(event.target);
    if (!at) return;
    const next = stepFrom(at, event.key, event.ctrlKey || event.metaKey, [
      lens.layers.length - 1,
      lens.prompt.length - 1,
    ]);
    if (next) box.current?.querySelector<HTMLElement>(`[data-at="${next.join(".")}"]`)?.focus();
    else if (event.key === "Enter" || event.key === " ") onChoose(at);
    else return;
    event.preventDefault();
  };

  // Scroll the selected cell into view, without scrolling the page; the grid opens at the left.
  useEffect(() => {
    const cell = box.current?.querySelector<HTMLElement>(`[data-at="${layer}.${position}"]`);
    if (!box.current || !cell || !picked) return;
    const names = box.current.querySelector("th")?.offsetWidth ?? 0;
    const [from, to] = [box.current.scrollLeft + names, box.current.scrollLeft + box.current.clientWidth];
    if (cell.offsetLeft < from) box.current.scrollLeft = cell.offsetLeft - names;
    else if (cell.offsetLeft + cell.offsetWidth > to)
      box.current.scrollLeft = cell.offsetLeft + cell.offsetWidth - box.current.clientWidth;
  }, [lens, layer, position]);

  const heads = useMemo(
    () => (
      <thead>
        {(
          [
            [undefined, s.read, lens.prompt],
            ["targets", s.target, lens.targets],
          ] as const
        ).map(([name, head, tokens]) => (
          <tr key={head} role="row" class={name}>
            <th scope="col" role="columnheader">
              {head}
            </th>
            {tokens.map((token, at) => (
              <th key={at} scope="col" role="columnheader" title={visible(textOfToken(token))}>
                <TokenText text={textOfToken(token)} />
              </th>
            ))}
          </tr>
        ))}
      </thead>
    ),
    [lens, s],
  );

  return (
    <div class="gridbox" ref={box} data-chart="grid">
      <table role="grid" aria-label={s.grid} onClick={choose} onKeyDown={move}>
        {heads}
        <tbody>
          {lens.layers.map(({ cells }, row) => (
            <tr key={row} role="row">
              <th scope="row" role="rowheader">
                {layerName(row, last, s)}
              </th>
              {cells.map((cell, at) => {
                const value = valueOf(cell, measure);
                const look = shade(shareOf(value, measure, scale));
                const here = row === layer && at === position;
                const hit = cell.best[0]?.id === lens.targets[at]?.id;
                return (
                  <td
                    key={at}
                    role="gridcell"
                    class={`${look.class}${hit ? " hit" : ""}`}
                    style={look.style}
                    tabIndex={here ? 0 : -1}
                    aria-selected={here}
                    aria-describedby="lens-tip"
                    data-at={`${row}.${at}`}
                    data-value={value}
                  >
                    <TokenText text={textOfToken(cell.best[0])} />
                    {figures ? <small>{brief(value, measure)}</small> : null}
                  </td>
                );
              })}
            </tr>
          ))}
        </tbody>
      </table>
      <Tooltip within={box} id="lens-tip" content={(at) => <CellFacts lens={lens} at={at} />} />
    </div>
  );
}

/** Scroll the grid to the left before an export, so that the layer names come first. */
export function scrollToStart(): void {
  document.querySelectorAll('[data-chart="grid"]').forEach((box) => {
    const left = box.scrollLeft;
    box.scrollLeft = 0;
    setTimeout(() => (box.scrollLeft = left));
  });
}

/** The tooltip of a cell. */
function CellFacts({ lens, at }: { lens: Lens; at: string }): JSX.Element | null {
  const { lens: s } = useStrings();
  const [row = 0, column = 0] = at.split(".").map(Number);
  const cell = lens.layers[row]?.cells[column];
  if (!cell) return null;
  return (
    <>
      <p>
        {layerName(row, lens.rows - 1, s)} · <TokenText text={textOfToken(cell.best[0])} />
      </p>
      <dl>
        {MEASURES.map((measure) => (
          <div key={measure}>
            <dt>{s.measures[measure]}</dt>
            <dd>{exact(valueOf(cell, measure), measure)}</dd>
          </div>
        ))}
      </dl>
    </>
  );
}

export function layerName(row: number, last: number, s: Strings["lens"]): string {
  return row === 0 ? s.embedding : row === last ? s.output : fill(s.layer, { n: row });
}

/** The cell that a key moves to; undefined for other keys. */
export function stepFrom([row, column]: At, key: string, far: boolean, [rows, columns]: At): At | undefined {
  const to: Record<string, At> = {
    ArrowUp: [Math.max(row - 1, 0), column],
    ArrowDown: [Math.min(row + 1, rows), column],
    ArrowLeft: [row, Math.max(column - 1, 0)],
    ArrowRight: [row, Math.min(column + 1, columns)],
    Home: [far ? 0 : row, 0],
    End: [far ? rows : row, columns],
  };
  return to[key];
}

function placeOf(target: EventTarget | null): At | undefined {
  const at = (target as Element | null)?.closest<HTMLElement>("[data-at]")?.dataset["at"];
  const [row, column] = at?.split(".").map(Number) ?? [];
  return row === undefined || column === undefined ? undefined : [row, column];
}
