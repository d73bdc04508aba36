// Find any token by its text or id, with its rank and probability.

import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { useStrings } from "../i18n";
import { whole } from "../ui/format";
import { text, useParam } from "../url";
import { chance } from "./ranked";
import type { Processed, Row } from "./row";
import { TokenText } from "./tokens";

const MOST = 8;
const NOTHING = text("");

interface FindProps {
  readonly row: Row;
  readonly processed: Processed;
  readonly texts: readonly string[];
  onTake(id: number): void;
}

export function Find({ row, processed, texts, onTake }: FindProps): JSX.Element {
  const { next: s } = useStrings();
  const [sought, setSought] = useParam("find", NOTHING);
  const found = useMemo(() => (sought ? search(sought, texts) : []), [sought, texts]);
  return (
    <div class="number">
      <label for="find">{s.find}</label>
      <input id="find" name="find" type="search" value={sought} onInput={(event) => setSought(event.currentTarget.value, true)} />
      {sought && !found.length ? <p class="note">{s.nothing}</p> : null}
      {found.length ? (
        <table class="facts" data-chart="found">
          <thead>
            <tr>
              <th scope="col">{s.id}</th>
              <th scope="col">{s.rank}</th>
              <th scope="col">{s.raw}</th>
              <th scope="col">{s.processed}</th>
            </tr>
          </thead>
          <tbody>
            {found.map((id) => {
              const place = row.placeOf(id);
              return (
                <tr key={id}>
                  <th scope="row">
                    <button type="button" class="word" onClick={() => onTake(id)}>
                      <TokenText text={texts[id] ?? ""} />
                    </button>{" "}
                    <small>{id}</small>
                  </th>
                  <td>{whole(place + 1)}</td>
                  <td>{chance(row.p(place))}</td>
                  <td>{chance(processed.p(place))}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
      ) : null}
    </div>
  );
}

/** The id, then equal texts, then texts that contain it. */
function search(sought: string, texts: readonly string[]): number[] {
  const found = new Set<number>();
  if (/^\d+$/.test(sought) && Number(sought) < texts.length) found.add(Number(sought));
  texts.forEach((text, id) => text.trim() === sought.trim() && found.size < MOST && found.add(id));
  texts.forEach((text, id) => found.size < MOST && text.includes(sought) && found.add(id));
  return [...found].slice(0, MOST);
}
