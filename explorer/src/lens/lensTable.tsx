// The grid as a table of numbers, built when it is opened.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { useStrings } from "../i18n/strings";
import { TokenText } from "../ui/tokenText";
import { layerName } from "./grid";
import { exact, textOfToken, valueOf, type Lens, type Measure } from "./lensMeasures";

export function Numbers({ lens, measure }: { lens: Lens; measure: Measure }): JSX.Element {
  const { lens: s, common } = useStrings();
  const [open, setOpen] = useState(false);
  const last = lens.rows - 1;
  return (
    <details data-chart="numbers" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>{common.numbers}</summary>
      {open ? (
        <div class="gridbox" tabIndex={0} role="region" aria-label={s.measures[measure]}>
          <table class="facts">
            <caption>{s.measures[measure]}</caption>
            <thead>
              <tr>
                <th scope="col">{s.read}</th>
                {lens.prompt.map((token, at) => (
                  <th key={at} scope="col">
                    <TokenText text={textOfToken(token)} />
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {lens.layers.map(({ cells }, row) => (
                <tr key={row}>
                  <th scope="row">{layerName(row, last, s)}</th>
                  {cells.map((cell, at) => (
                    <td key={at}>
                      {exact(valueOf(cell, measure), measure)} <TokenText text={textOfToken(cell.best[0])} />
                    </td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      ) : null}
    </details>
  );
}
