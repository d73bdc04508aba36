// One next token: both distributions as paired bars, and their divergence.

import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { useVocabulary } from "../useRequest";
import { fill, useStrings } from "../i18n/strings";
import { barWidth, chance, type BarScale } from "../next/rankedTokens";
import { Track } from "../ui/bars";
import { TokenText } from "../ui/tokenText";
import { Choice, optionsOf } from "../ui/controls";
import { ExportPanel } from "../ui/exportPanel";
import { fixed, percent, signed } from "../ui/format";
import { integer, oneOf, useParam } from "../url";
import { promptDocument, promptLines, promptTable, type Sides, sidesText, tokensShown } from "./compareExport";
import { Totals, type Total } from "./compareTotals";
import { distribution, massOf, pair, shownTokens, type Sort } from "./divergence";
import type { Rows } from "./useCompare";
import { Heads } from "../ui/factsTable";

interface PromptProps {
  readonly found: Rows;
  readonly sides: Sides;
  /** The prompt. */
  readonly prompt: string;
  /** Whether the numbers belong to the current settings. */
  readonly settled: boolean;
}

export function PromptResult({ found, sides, prompt, settled }: PromptProps): JSX.Element {
  const { comparing: s, common, next } = useStrings();
  const [top, setTop] = useParam("top", integer(12, 1, 200));
  const [sort, setSort] = useParam("sort", oneOf<Sort>("most", ["most", "apart"]));
  const options = sides.samplers;
  const texts = useVocabulary(sides.models[0].name);
  const a = useMemo(() => distribution(found.rows[0], options?.[0]), [found, JSON.stringify(options?.[0].library)]);
  const b = useMemo(() => distribution(found.rows[1], options?.[1]), [found, JSON.stringify(options?.[1].library)]);
  const both = useMemo(() => pair(a, b), [a, b]);
  const ids = useMemo(() => shownTokens(a, b, top, sort), [a, b, top, sort]);
  const [scale, setScale] = useParam("bars", oneOf<BarScale>("linear", ["linear", "log"]));
  const tokenText = (id: number): string => (texts.current && texts.data?.[id]) || String(id);
  const totals: Total[] = [
    { name: "kl", label: s.kl, value: both.kl, text: nats(both.kl, s.nats) },
    { name: "variation", label: s.variation, value: both.variation, text: fixed(both.variation, 4) },
    {
      name: "agreement",
      label: s.same,
      value: Number(both.bestA === both.bestB),
      text: both.bestA === both.bestB ? s.yes : s.no,
    },
    ...(["a", "b"] as const).map((side) => {
      const value = side === "a" ? both.entropyA : both.entropyB;
      return { name: `entropy_${side}`, label: fill(s.entropyOf, { side: s[side] }), value, text: nats(value, s.nats) };
    }),
  ];
  return (
    <div class="compared">
      <Totals totals={totals} />
      {both.kl === Infinity ? <p class="note">{s.infinite}</p> : null}
      {both.variation === 0 ? <p class="note">{s.identical}</p> : null}
      <Choice name="sort" label={s.sort} value={sort} options={optionsOf(s, "most", "apart")} onChoose={setSort} />
      <Choice
        name="bars"
        label={next.scale}
        value={scale}
        options={optionsOf(next, "linear", "log")}
        onChoose={setScale}
      />
      <table class="bars pairs" data-chart="pairs">
        <caption>{s.next}</caption>
        <Heads
          of={[
            common.token,
            [fill(s.p, { side: s.a }), "figure"],
            [fill(s.p, { side: s.b }), "figure"],
            [s.difference, "figure gap"],
          ]}
          bar
        />
        <tbody>
          {ids.map((id) => {
            const [p, q] = [a[id] ?? NaN, b[id] ?? NaN];
            return (
              <tr key={id} data-id={id} data-a={p} data-b={q}>
                <th scope="row">
                  <TokenText text={tokenText(id)} />
                </th>
                <td class="figure">{chance(p)}</td>
                <td class="figure">{chance(q)}</td>
                <td class="figure gap">{signed(q - p, 4)}</td>
                <td class="bar">
                  <Track share={barWidth(p, scale)} tone="up" />
                  <Track share={barWidth(q, scale)} tone="down" />
                </td>
              </tr>
            );
          })}
        </tbody>
      </table>
      <p class="note">{fill(s.covered, { a: percent(massOf(a, ids)), b: percent(massOf(b, ids)) })}</p>
      <div class="controls buttons">
        <button
          type="button"
          data-do="more"
          disabled={top >= Math.min(200, a.length)}
          onClick={() => setTop(Math.min(200, top * 2))}
        >
          {s.more}
        </button>
      </div>
      {settled ? (
        <ExportPanel
          name="compare-next"
          title={s.title}
          document={() => promptDocument(sides, prompt, both, tokensShown(ids, a, b, tokenText))}
          tables={() => [promptTable(tokensShown(ids, a, b, tokenText), s.next)]}
          charts='[data-chart="totals"], [data-chart="pairs"]'
          about={{ models: sides.models.map(({ name }) => name), prompt: prompt, settings: sidesText(sides) }}
          lines={(where) => promptLines(sides, where, prompt, ids.length)}
        />
      ) : null}
    </div>
  );
}

export function nats(x: number, text: string): string {
  return x === Infinity ? "∞" : fill(text, { x: fixed(x, 4) });
}
