// A comparison on a text: totals, the map of differences, one position, and the largest differences.

import type { JSX } from "preact";
import { Legend } from "../heat/legend";
import { fill, useStrings } from "../i18n/strings";
import { Choice } from "../ui/controls";
import { ExportPanel } from "../ui/exportPanel";
import { fixed, percent, grouped } from "../ui/format";
import { change, integer, oneOf, useParam } from "../url";
import { type Sides, sidesText, textDocument, textLines, textTable } from "./compareExport";
import { DifferenceMap } from "./differenceMap";
import { legendOf, measuresOf, maxOf, type Measure } from "./compareMeasures";
import { PlacePanel, Worst, PlaceTable } from "./positions";
import { nats } from "./promptResult";
import type { TextField } from "../text/usePromptParam";
import { Totals, type Total } from "./compareTotals";
import type { TextComparison } from "./useCompare";

interface AlongProps {
  readonly found: TextComparison;
  readonly sides: Sides;
  readonly field: TextField;
  /** Whether the numbers belong to the current settings. */
  readonly settled: boolean;
}

export function TextResult({ found, sides, field, settled }: AlongProps): JSX.Element {
  const { comparing: s } = useStrings();
  const samplers = found.perplexity === null;
  const measures = measuresOf(samplers);
  const [measure, setMeasure] = useParam("by", oneOf<Measure>(measures[0] ?? "kl", measures));
  const [at] = useParam("at", integer(0, 1, 1e6));
  const setAt = (position: number): void => change({ ...field.to(field.text ?? ""), at: String(position) });
  const max = maxOf(found.places, measure);
  const worst = [...found.places].sort(
    (x, y) =>
      (y.kl ?? Infinity) - (x.kl ?? Infinity) ||
      (y.total_variation ?? 0) - (x.total_variation ?? 0) ||
      x.position - y.position,
  );
  const place = found.places.find(({ position }) => position === at) ?? worst[0];
  const kl = found.kl ?? Infinity;
  const agreed = Math.round(found.agreement * found.positions);
  const totals: Total[] = [
    { name: "kl", label: s.meanKl, value: kl, text: nats(kl, s.nats) },
    { name: "max_kl", label: s.maxKl, value: found.max_kl ?? Infinity, text: nats(found.max_kl ?? Infinity, s.nats) },
    ...(found.total_variation === null
      ? []
      : [
          {
            name: "total_variation",
            label: s.meanVariation,
            value: found.total_variation,
            text: fixed(found.total_variation, 4),
          },
        ]),
    {
      name: "agreement",
      label: s.same,
      value: found.agreement,
      text: fill(s.share, { n: grouped(agreed), all: grouped(found.positions), share: percent(found.agreement) }),
    },
    ...(found.perplexity ?? []).map((value, i) => ({
      name: i ? "perplexity_b" : "perplexity_a",
      label: fill(s.perplexityOf, { side: i ? s.b : s.a }),
      value: value ?? Infinity,
      text: value === null ? "∞" : fixed(value, 4),
    })),
  ];
  const prefix = place ? [found.first, ...found.places.slice(0, place.position - 1).map(({ token }) => token)] : [];
  return (
    <div class="compared">
      <Totals totals={totals} />
      {kl === Infinity ? <p class="note">{s.infinite}</p> : null}
      {found.max_kl === 0 && !found.total_variation ? <p class="note">{s.identical}</p> : null}
      <Choice
        name="by"
        label={s.by}
        value={measure}
        options={measures.map((one) => [one, s.measures[one]] as const)}
        onChoose={setMeasure}
      />
      <p class="note">{s.explain[measure]}</p>
      <Legend title={measure === "gain" ? s.gainLegend : s.legend} steps={legendOf(measure, max)} notes={[s.parted]} />
      <div class="look">
        <div class="main">
          <DifferenceMap found={found} measure={measure} max={max} chosen={place?.position ?? 0} onChoose={setAt} />
          <Worst places={worst} onChoose={setAt} />
          <PlaceTable places={found.places} samplers={samplers} />
        </div>
        {place ? (
          <PlacePanel
            place={place}
            samplers={samplers}
            onOpen={
              prefix.some(({ text }) => text.includes("\ufffd"))
                ? undefined
                : () => change({ where: null, prompt: plainText(prefix) })
            }
          />
        ) : null}
      </div>
      {settled ? (
        <ExportPanel
          name="compare"
          title={s.title}
          document={() => textDocument(sides, found)}
          tables={() => [textTable(found, s.map)]}
          charts='[data-chart="totals"], [data-chart="legend"], [data-chart="map"]'
          about={{ models: sides.models.map(({ name }) => name), prompt: field.text ?? "", settings: sidesText(sides) }}
          lines={(where) => textLines(sides, where, field.text ?? "")}
        />
      ) : null}
    </div>
  );
}

/** The text of tokens, without special tokens, which have a name and no bytes. */
function plainText(tokens: readonly { readonly text: string; readonly bytes?: readonly number[] }[]): string {
  return tokens.map(({ text, bytes }) => (bytes?.length ? text : "")).join("");
}
