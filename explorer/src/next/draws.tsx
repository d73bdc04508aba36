// 1,000 seeded draws from the distribution that the sampler leaves, beside its probabilities.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { fill, useStrings } from "../i18n/strings";
import type { Processed } from "../sampler/process";
import type { Row } from "../sampler/row";
import { fixed, grouped } from "../ui/format";
import { chance } from "./rankedTokens";
import { Track } from "../ui/bars";
import { TokenText } from "../ui/tokenText";
import { Heads } from "../ui/factsTable";

const [DRAWS, SHOWN, SLICE_MS] = [1000, 12, 12];

interface DrawsProps {
  readonly row: Row;
  readonly processed: Processed;
  readonly seed: number;
  /** Of the first draw. */
  readonly position: number;
  tokenText(id: number): string;
}

export function Draws({ row, processed, seed, position, tokenText }: DrawsProps): JSX.Element {
  const { sampler: t, next: s, common } = useStrings();
  const [wanted, setWanted] = useState<Processed>();
  const [counts, setCounts] = useState<ReadonlyMap<number, number>>(new Map());
  const running = wanted === processed;
  const done = [...counts.values()].reduce((sum, count) => sum + count, 0);

  useEffect(() => {
    if (!running) return;
    const found = new Map<number, number>();
    let [at, timer] = [0, 0];
    const slice = (): void => {
      const end = performance.now() + SLICE_MS;
      while (at < DRAWS && performance.now() < end) {
        const rank = processed.drawAt(seed, position + at++);
        const id = row.ids[rank] ?? 0;
        found.set(id, (found.get(id) ?? 0) + 1);
      }
      setCounts(new Map(found));
      if (at < DRAWS) timer = window.setTimeout(slice);
    };
    slice();
    return () => clearTimeout(timer);
  }, [running, processed, seed, position]);

  const shown = running
    ? [...counts].sort(([a, x], [b, y]) => y - x || row.rankOf(a) - row.rankOf(b)).slice(0, SHOWN)
    : [];
  return (
    <section class="draws" aria-label={t.draws.title} data-chart="draws">
      <div class="controls buttons">
        <button type="button" data-do="draws" disabled={running} onClick={() => setWanted(processed)}>
          {t.draws.go}
        </button>
        <span class="note" role="status">
          {running && done < DRAWS ? fill(t.draws.progress, { n: grouped(done), all: grouped(DRAWS) }) : ""}
        </span>
      </div>
      {shown.length ? (
        <>
          <table class="bars">
            <caption>{t.draws.title}</caption>
            <Heads
              of={[common.token, [t.draws.times, "figure"], [t.draws.share, "figure"], [s.processed, "figure"]]}
              bar
            />
            <tbody>
              {shown.map(([id, count]) => (
                <tr key={id} data-id={id} data-count={count}>
                  <th scope="row">
                    <TokenText text={tokenText(id)} />
                  </th>
                  <td class="figure">{grouped(count)}</td>
                  <td class="figure">{fixed(count / Math.max(1, done), 3)}</td>
                  <td class="figure">{chance(processed.pOf(id))}</td>
                  <td class="bar">
                    <Track share={count / Math.max(1, done)} mark={processed.pOf(id)} />
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
          <p class="note">{t.draws.note}</p>
        </>
      ) : null}
    </section>
  );
}
