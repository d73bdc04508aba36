// Find any token by its text or id, with its rank and probability.

import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { useStrings } from "../i18n/strings";
import { grouped } from "../ui/format";
import { text, useParam } from "../url";
import { chance } from "./rankedTokens";
import type { Processed } from "../sampler/process";
import type { Row } from "../sampler/row";
import { TokenText } from "../ui/tokenText";
import { Heads } from "../ui/factsTable";

const MAX_MATCHES = 8;
const NOTHING = text("");

interface FindProps {
  readonly row: Row;
  readonly processed: Processed;
  readonly texts: readonly string[];
  onTake(id: number): void;
}

export function FindToken({ row, processed, texts, onTake }: FindProps): JSX.Element {
  const { next: s } = useStrings();
  const [query, setQuery] = useParam("find", NOTHING);
  const found = useMemo(() => (query ? search(query, texts) : []), [query, texts]);
  return (
    <div class="number">
      <label for="find">{s.find}</label>
      <input
        id="find"
        name="find"
        type="search"
        value={query}
        onInput={(event) => setQuery(event.currentTarget.value, true)}
      />
      {query && !found.length ? <p class="note">{s.nothing}</p> : null}
      {found.length ? (
        <table class="facts" data-chart="found">
          <Heads of={[s.id, s.rank, s.raw, s.processed]} />
          <tbody>
            {found.map((id) => {
              const rank = row.rankOf(id);
              return (
                <tr key={id}>
                  <th scope="row">
                    <button type="button" class="token-button" onClick={() => onTake(id)}>
                      <TokenText text={texts[id] ?? ""} />
                    </button>{" "}
                    <small>{id}</small>
                  </th>
                  <td>{grouped(rank + 1)}</td>
                  <td>{chance(row.p(rank))}</td>
                  <td>{chance(processed.p(rank))}</td>
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
function search(query: string, texts: readonly string[]): number[] {
  const found = new Set<number>();
  if (/^\d+$/.test(query) && Number(query) < texts.length) found.add(Number(query));
  texts.forEach((text, id) => text.trim() === query.trim() && found.size < MAX_MATCHES && found.add(id));
  texts.forEach((text, id) => found.size < MAX_MATCHES && text.includes(query) && found.add(id));
  return [...found].slice(0, MAX_MATCHES);
}
